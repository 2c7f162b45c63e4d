"""Structured output: masks of the next tokens under a JSON schema, a regex, a list of choices or a Lark grammar.

llguidance does the parsing. It is imported with the first structured request.
"""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from bankfull.errors import RequestError
from bankfull.sample.params import StructuredOutput

if TYPE_CHECKING:
    import llguidance

_Made = TypeVar("_Made")

_CACHED_GRAMMARS = 64
"""Maximum compiled grammars in the cache."""
_CACHED_BYTES = 256 << 20
"""Maximum bytes of the cached grammars, measured as the growth of the process while they were compiled."""
_LEXER_STATES = 32_768
"""Maximum lexer states of one grammar, 1 to 2 kB each. With the library's own limit one grammar could take 0.5 GB."""
_REASON_CHARS = 300
"""Characters of an error message that are kept."""
# A chain of rules as long as the largest accepted source overflows a stack of the usual size, which ends the process.
# Only a grammar like that touches the pages of this stack.
_STACK_BYTES = 2**30
_stack_lock = threading.Lock()


class GrammarTokenizer(Protocol):
    """The part of a tokenizer that grammars need."""

    @property
    def backend(self) -> Any: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_ids(self) -> Collection[int]: ...
    @property
    def special_ids(self) -> Collection[int]: ...
    def token_bytes(self, token: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """The drafts of a sequence's next step: a tree, whose parents come before their children."""

    tokens: Sequence[int]
    parents: Sequence[int]
    """The index of each draft's parent; -1 for the last known token."""


class Matcher:
    """One sequence's position in its grammar. Not thread-safe: wait for a mask before advancing."""

    __slots__ = ("_inner", "_known", "_vocab")

    def __init__(self, inner: llguidance.LLMatcher, vocab: int, known: NDArray[np.int32] | None = None) -> None:
        self._inner = inner
        self._vocab = vocab
        self._known = known
        """The mask at this position, if it was computed already. Read-only: other matchers share it."""

    @property
    def known(self) -> bool:
        """Whether the mask is computed already."""
        return self._known is not None

    def mask(self) -> NDArray[np.int32]:
        """Packed bits of the allowed next tokens; end tokens only where the grammar may end."""
        if self._known is not None:
            return self._known
        bits = np.frombuffer(self._inner.compute_bitmask(), dtype=np.int32)
        self._check()
        words = np.zeros((self._vocab + 31) // 32, dtype=np.int32)
        shared = min(len(bits), len(words))
        words[:shared] = bits[:shared]
        if self._vocab % 32:
            words[-1] &= np.int32((1 << self._vocab % 32) - 1)
        return words

    def masks_along(self, drafts: DraftTokens) -> NDArray[np.int32]:
        """The mask here, and after each draft: of the tokens that may follow its path. All zeros after a path that the
        grammar forbids; all ones after one that completes it and after all drafts behind that one, since what follows
        a complete grammar is dropped, whatever it is. The position does not change."""
        masks = np.zeros((1 + len(drafts.tokens), (self._vocab + 31) // 32), np.int32)
        masks[0] = self.mask()
        complete = np.zeros(len(masks), bool)
        children: list[list[int]] = [[] for _ in masks]
        for draft, parent in enumerate(drafts.parents):
            children[parent + 1].append(draft)
        # A copy per leaf: llguidance cannot roll back from a complete grammar.
        todo = [(self.copy(), 0)]
        while todo:
            matcher, line = todo.pop()
            # The library would fail for an id that only the model has; a draft below 0 is none.
            allowed = [d for d in children[line] if (t := drafts.tokens[d]) >= 0 and masks[line, t // 32] >> t % 32 & 1]
            for draft in allowed:
                follower = matcher if draft == allowed[-1] else matcher.copy()
                try:
                    follower.advance(drafts.tokens[draft])
                    if follower.finished:
                        complete[draft + 1] = True
                        continue
                    masks[draft + 1] = follower.mask()
                except RequestError:
                    continue  # the grammar cannot go on there: an error only for a sequence that goes there
                todo.append((follower, draft + 1))
        for draft, parent in enumerate(drafts.parents):
            complete[draft + 1] |= complete[parent + 1]
        masks[complete] = -1
        return masks

    def advance(self, token: int) -> None:
        """Advance by `token`; raises RequestError if the grammar forbids it."""
        self._known = None
        if token < 0:
            raise RequestError("no token satisfies the request's grammar and its other bans: relax one of them.")
        if not self._inner.consume_token(token):
            self._check()
            raise RequestError(f"token {token} is not allowed by the request's grammar: report this as a defect.")

    @property
    def finished(self) -> bool:
        """Whether only an end token may follow."""
        return self._inner.is_stopped()

    def accepts(self, tokens: Sequence[int]) -> int:
        """The number of leading tokens that the grammar accepts from here; the position does not change."""
        return self._inner.validate_tokens(list(tokens))

    def copy(self) -> Matcher:
        return Matcher(self._inner.deep_copy(), self._vocab, self._known)

    def _check(self) -> None:
        if self._inner.is_error():
            reason = _one_line(self._inner.get_error())
            raise RequestError(f"the structured output's grammar cannot go on ({reason}): simplify the grammar.")


@dataclass(slots=True)
class Compiled:
    """A grammar at its start, with the first mask, which all its sequences share."""

    matcher: Matcher
    cost: int
    """Growth of the process in bytes during compilation; other threads may have caused some of it."""


class GrammarCompiler:
    """Compiles each grammar once, in an LRU cache with limits on number and size. `vocab` is the width of the model's
    logits: ids beyond the tokenizer are never allowed. Compiling a large grammar takes seconds, without the GIL: call
    it outside of the engine's loop."""

    def __init__(self, tokenizer: GrammarTokenizer, vocab: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._vocab = tokenizer.vocab_size if vocab is None else vocab
        self._lock = threading.Lock()
        self._made: OrderedDict[tuple[str, str], Future[Compiled]] = OrderedDict()
        self._words: llguidance.LLTokenizer | None = None

    def compile(self, structured: StructuredOutput) -> Matcher:
        key = (structured.kind, structured.source)
        with self._lock:
            pending = self._made.get(key)
            mine = pending is None
            if pending is None:
                pending = self._made[key] = Future()
            self._made.move_to_end(key)
        if mine:
            try:
                pending.set_result(_with_deep_stack(lambda: self._compiled(structured)))
            except BaseException as problem:
                with self._lock:
                    if self._made.get(key) is pending:
                        del self._made[key]
                pending.set_exception(problem)
            self._forget_old()
        return pending.result().matcher.copy()

    def _forget_old(self) -> None:
        with self._lock:
            done = [future for future in self._made.values() if future.done() and future.exception() is None]
            size = sum(future.result().cost for future in done)
            for key, future in list(self._made.items()):
                if len(self._made) <= _CACHED_GRAMMARS and size <= _CACHED_BYTES:
                    break
                if future.done() and future.exception() is None:
                    size -= future.result().cost
                    del self._made[key]

    def _compiled(self, structured: StructuredOutput) -> Compiled:
        before = _resident_bytes()
        inner = self._build(structured)
        first = Matcher(inner, self._vocab, Matcher(inner, self._vocab).mask())
        return Compiled(first, max(len(structured.source), _resident_bytes() - before))

    def _build(self, structured: StructuredOutput) -> llguidance.LLMatcher:
        library = _library()
        with self._lock:
            if self._words is None:
                self._words = _token_trie(library, self._tokenizer)
            words = self._words
        try:
            matcher: llguidance.LLMatcher = library.LLMatcher(
                words,
                _grammar_text(library, structured),
                log_level=0,
                limits=library.LLParserLimits(max_lexer_states=_LEXER_STATES),
            )
            reason = matcher.get_error() if matcher.is_error() else ""
        except ValueError as problem:
            reason = str(problem) or "it cannot be read"
        if reason:
            raise RequestError(f"structured.{structured.kind} cannot be used: {_one_line(reason)}.")
        return matcher


class MaskPool:
    """Computes masks on threads while the device works; llguidance releases the GIL."""

    def __init__(self, threads: int = 2) -> None:
        self._threads = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="grammar-mask")

    def submit(self, matcher: Matcher, drafts: DraftTokens | None = None) -> Future[NDArray[np.int32]]:
        """The mask at the matcher's position, or with drafts one for it and one after each of them."""
        if drafts is not None:
            return self._threads.submit(matcher.masks_along, drafts)
        if matcher.known:
            there: Future[NDArray[np.int32]] = Future()
            there.set_result(matcher.mask())
            return there
        return self._threads.submit(matcher.mask)

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)


def _resident_bytes() -> int:
    """Resident bytes of this process; 0 where the system has no /proc."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise RequestError("structured output needs the package llguidance: install it and try again.") from None
    return llguidance


def _grammar_text(library: Any, structured: StructuredOutput) -> str:
    source = structured.source
    if structured.kind == "json":
        try:
            json.loads(source)
        except (ValueError, RecursionError) as problem:
            reason = _one_line(str(problem))
            raise RequestError(f"structured.json is not JSON ({reason}): give a JSON schema.") from None
        return str(library.LLMatcher.grammar_from_json_schema(source))
    if structured.kind == "regex":
        return str(library.LLMatcher.grammar_from_regex(source))
    if structured.kind == "choice":
        source = "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in structured.choice or ())
    return str(library.LLMatcher.grammar_from_lark(source))


def _token_trie(library: Any, tokenizer: GrammarTokenizer) -> llguidance.LLTokenizer:
    """Built from the bytes that the detokenizer writes, so that grammar and output agree."""
    ends = list(tokenizer.eos_ids)
    if not ends:
        raise RequestError("structured output needs an end token, but the model's tokenizer names none: leave it out.")
    trie: llguidance.LLTokenizer = library.LLTokenizer(
        library.TokenizerWrapper(_TokenizerView(tokenizer, ends[0])), n_vocab=tokenizer.vocab_size, eos_token=ends
    )
    return trie


class _TokenizerView:
    """The tokenizer interface of llguidance; special tokens have their names as bytes, and never match plain text."""

    bos_token_id = None

    def __init__(self, tokenizer: GrammarTokenizer, end: int) -> None:
        self.eos_token_id = end
        special = set(tokenizer.special_ids) | set(tokenizer.eos_ids)
        self.special_token_ids = sorted(special)
        self.tokens = [self._bytes_of(tokenizer, token, token in special) for token in range(tokenizer.vocab_size)]
        # A copy, because reading special tokens as plain text is a setting of the object.
        self._backend = type(tokenizer.backend).from_str(tokenizer.backend.to_str())
        self._backend.encode_special_tokens = True
        self._backend.no_truncation()
        self._backend.no_padding()

    def __call__(self, text: str | bytes) -> list[int]:
        """The model's usual tokens for text that the grammar forces. For a tokenizer that puts a space before every
        text, a mark is put before the text and cut off afterwards. Empty if the tokens' bytes differ from the text."""
        wanted = text.encode() if isinstance(text, str) else text
        readable = wanted.decode(errors="replace")
        for mark in (b"", b"\x02"):
            ids: list[int] = self._backend.encode(mark.decode() + readable, add_special_tokens=False).ids
            written = b""
            for cut, token in enumerate(ids):
                if written.lstrip(b" ") == mark and b"".join(self.tokens[i] for i in ids[cut:]) == wanted:
                    return ids[cut:]
                written += self.tokens[token]
                if len(written) > len(mark) + 1:
                    break
        return []

    @staticmethod
    def _bytes_of(tokenizer: GrammarTokenizer, token: int, special: bool) -> bytes:
        name = tokenizer.backend.id_to_token(token)
        if name is None:
            return b""
        return str(name).encode() if special else tokenizer.token_bytes(token)


def _one_line(reason: str) -> str:
    """An error message without the quoted source, the marks under it, and the parser's state."""
    lines = [line.strip() for line in reason.split("<state>")[0].splitlines()]
    lines = [line for line in lines if line.strip("^ ") and not line.split("|")[0].strip().isdigit()]
    text = " ".join(" ".join(lines).split()).rstrip(".")
    return text if len(text) <= _REASON_CHARS else text[:_REASON_CHARS] + "..."


def _with_deep_stack(work: Callable[[], _Made]) -> _Made:
    outcome: Future[_Made] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as problem:
            outcome.set_exception(problem)

    with _stack_lock:
        usual = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="grammar-compile")
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    return outcome.result()
