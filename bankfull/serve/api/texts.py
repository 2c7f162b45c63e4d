"""The served model's tokenizer, chat template and sampling defaults, in a process that never loads torch.

Rendering and tokenizing may take long: they run on threads (`desk`), long texts in windows of bounded size, and a text
that no prompt could hold is refused by its length. A short text is done on the event loop: that takes less time than
waking a thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from bankfull.errors import BankfullError
from bankfull.sample.params import SamplingParams
from bankfull.sample.recommended import recommended
from bankfull.serve.api.errors import ContextOverflow, Refusal
from bankfull.serve.desk import Desk, DeskJob
from bankfull.serve.telemetry.trace import current_trace, owner_of_call
from bankfull.text.load import load_tokenizer
from bankfull.text.template import ChatTemplate, encode_chat, render_chat
from bankfull.text.tokenizer import Tokenizer
from bankfull.text.windows import WINDOW, last_windows, windows
from bankfull.weights.locate import locate
from bankfull.weights.text_files import open_text_files

Arguments = ParamSpec("Arguments")
Made = TypeVar("Made")
Slices = Generator[int, None, Made]
"""Work in slices: yields the size of each slice, and returns the result."""

SHORT_TEXT, SHORT_CONVERSATION = 1024, 16
"""Characters and messages up to which a conversation is rendered and tokenized on the event loop."""
SHORT_SECONDS = 0.005
"""Seconds that short texts may take in one turn of the event loop; more of them go to a thread. A template is a
program: if a single text takes longer, the next DETOURS texts go to a thread, too."""
DETOURS = 1000
MAX_LOGPROB_ENTRIES = 1 << 18
USUAL_ANSWER = 4096
"""Assumed length of an answer without max_tokens, for the limit of logprobs."""
MAX_CHARACTERS = 8_000_000
"""Characters a text may have."""
MAX_WAITING, MAX_WAITING_PER_KEY = 64_000_000, 16_000_000
"""Characters that wait to be rendered and tokenized, in total and per key; more are refused with 429."""
BATCH_AT_ONCE = 2
"""Lines of batches that are rendered and tokenized at the same time; the others wait in their file."""


class Texts:
    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, defaults: Mapping[str, Any]) -> None:
        """`defaults`: default sampling parameters, under the names of SamplingParams."""
        self.tokenizer, self.template, self.defaults = tokenizer, template, dict(defaults)
        self.model = "the model"
        """The model's name, for messages."""
        self.spans = tokenizer.spans
        self.desk = Desk("bankfull-texts", most_size=MAX_WAITING, most_size_per_key=MAX_WAITING_PER_KEY, what="texts")
        self._batch_turns = asyncio.Semaphore(BATCH_AT_ONCE)
        self._detours = 0
        self._spent = 0.0
        """Seconds that short texts took in this turn of the event loop."""
        if template is not None:
            _ = template.variables  # a broken template fails the start, not a call
            # Cached properties of the template are computed now, so that the first call does not wait for them.
            with suppress(BankfullError):
                encode_chat(tokenizer, template, [{"role": "user", "content": "?"}])

    @classmethod
    def open(cls, model: str) -> Texts:
        """Open by path, hub id or short name; downloads missing files."""
        files = open_text_files(locate(model))
        tokenizer, template = load_tokenizer(files)
        texts = cls(tokenizer, template, recommended(files, chats=template is not None))
        texts.model = model
        return texts

    def misfit(self, model: str) -> str:
        """Why another model cannot be served with these texts, in one sentence; empty if it can. Reads its files."""
        tokenizer, template = load_tokenizer(open_text_files(locate(model)))
        chats = template is not None and self.template is not None and template.same_as(self.template)
        for what, same in (
            ("vocabulary", tokenizer.vocab_size == self.tokenizer.vocab_size),
            ("tokenizer", tokenizer.same_as(self.tokenizer)),
            ("chat template", chats or template is self.template is None),
        ):
            if not same:
                return (
                    f"{model} has another {what} than {self.model}, which this server was started with: start another "
                    "server for it."
                )
        return ""

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template itself has a place for tools."""
        return self.template is not None and self.template.takes_tools

    def close(self) -> None:
        self.desk.close()

    async def run(self, size: int, work: Callable[[], Made] | Callable[[], Slices[Made]]) -> Made:
        """`work` on a thread, slice by slice where it is a generator. `size`: about the characters that it reads or
        writes. Raises Busy when the queue is full; cancelling the wait drops the work."""
        trace, owner = current_trace(), owner_of_call()
        if trace is None or not trace.batch:
            return await self._run(DeskJob(owner, size, False, work, _untold))
        async with self._batch_turns:
            return await self._run(DeskJob(owner, size, True, work, _untold))

    async def _run(self, job: DeskJob) -> Any:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Any] = loop.create_future()

        def end(made: Any, error: BaseException | None) -> None:
            if not ended.done():  # else the client has left
                ended.set_result(made) if error is None else ended.set_exception(error)

        def tell(made: Any, error: BaseException | None) -> None:
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(end, made, error)

        job.tell = tell
        self.desk.put(job)
        try:
            return await ended
        except asyncio.CancelledError:
            self.desk.drop(job)
            raise

    async def run_if(self, size: int, work: Callable[[], Made]) -> Made:
        """`work` on a thread if it is large, else at once."""
        return await self.run(size, work) if size > SHORT_TEXT else work()

    async def run_short(self, short: bool, size: int, work: Callable[[], Slices[Made]]) -> Made:
        """`work` on a text: at once if the text is short, else on a thread, which takes two more wake-ups."""
        if not short or self._detours or self._spent > SHORT_SECONDS:
            self._detours = max(0, self._detours - 1)
            return await self.run(size, work)
        begun = time.perf_counter()  # includes the wait for the template's process
        try:
            return finished(work())
        finally:
            seconds = time.perf_counter() - begun
            if seconds > SHORT_SECONDS:
                self._detours = DETOURS
            if not self._spent:
                asyncio.get_running_loop().call_soon(self._next_turn)
            self._spent += seconds

    def _next_turn(self) -> None:
        self._spent = 0.0

    # -- on a thread, or at once where the text is short

    def encode(
        self,
        text: str,
        context: int,
        *,
        add_special: bool = True,
        param: str = "prompt",
        fits: bool = True,
        keep: int | None = None,
    ) -> Slices[list[int]]:
        """The ids of a text. A text that cannot be a prompt of `context` tokens is refused by its length; with `fits`
        also one that turns out to have more. `keep`: only the last `keep` ids are needed, and others may be missing."""
        opening = None if add_special else False
        return (yield from self._encode(self.tokenizer.spelled(text), None, context, param, fits, keep, opening))

    def _encode(
        self,
        text: str,
        marker: str | None,
        context: int,
        param: str,
        fits: bool,
        keep: int | None,
        opening: bool | None,
    ) -> Slices[list[int]]:
        if keep is not None and len(text) > WINDOW:
            ids, whole = yield from self._last_ids(text, marker, context, param, keep)
            return self.tokenizer.opened(ids, opening) if whole else ids
        self._refuse_long(text, context, param)
        ids = []
        for part in windows(text, self.spans) if len(text) > WINDOW else (text,):
            ids += self.tokenizer.encode_spelled(part, marker)
            if fits and keep is None and len(ids) > context:
                raise ContextOverflow(
                    f"{param} has {len(ids)} tokens and more, but the context holds {context}; shorten it, or set "
                    "truncate_prompt_tokens.",
                    param,
                )
            yield len(part)
        return self.tokenizer.opened(ids, opening)

    def _last_ids(
        self, text: str, marker: str | None, context: int, param: str, keep: int
    ) -> Slices[tuple[list[int], bool]]:
        """At least `keep` ids of the text's end, and whether they are all. A part is tokenized only if the later parts
        have too few ids: together they are at most what `keep` tokens can cover, and one part more."""
        parts: list[list[int]] = []
        count = left = 0
        for part in last_windows(text, self.spans):
            left += len(part)
            if len(part) > 2 * WINDOW and self.spans.exceeds(part, context):
                raise ContextOverflow(
                    f"{param} has {len(part)} characters in a row with no space between two words, which is more than "
                    f"the context of {context} tokens can hold and cannot be cut to fit; shorten it.",
                    param,
                )
            parts.append(self.tokenizer.encode_spelled(part, marker))
            count += len(parts[-1])
            yield len(part)
            if count >= keep:
                break
        return [token for part in reversed(parts) for token in part], left == len(text)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        context: int,
        *,
        fits: bool = True,
        keep: int | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> Slices[list[int]]:
        """The ids of a conversation; `context`, `fits` and `keep` as in `encode`."""
        if self.template is None:
            raise Refusal("This model has no chat template: use /v1/completions with a plain prompt.", param="messages")
        given = dict(options or {})
        for name in ("messages", "tools", "add_generation_prompt", "tokenizer", "template"):
            if name in given:
                raise Refusal(f"chat_template_kwargs must not hold {name!r}.", param="chat_template_kwargs")
        text, marker = render_chat(
            self.tokenizer, self.template, messages, tools=tools, add_generation_prompt=add_generation_prompt, **given
        )
        yield 1
        return (yield from self._encode(self.tokenizer.spelled(text), marker, context, "messages", fits, keep, None))

    def check_ids(self, ids: Sequence[int], vocab: int, param: str = "prompt") -> list[int]:
        for token in ids:
            if not 0 <= token < vocab:
                raise Refusal(f"{param} holds the token {token}: ids go from 0 to {vocab - 1}.", param=param)
        return list(ids)

    def _refuse_long(self, text: str, context: int, param: str) -> None:
        """Refuses a text that cannot fit even if every token were the longest of the vocabulary."""
        if len(text) > MAX_CHARACTERS:
            raise Refusal(f"{param} has {len(text)} characters; give at most {MAX_CHARACTERS}.", param=param)
        if self.spans.exceeds(text, context):
            raise ContextOverflow(
                f"{param} has {len(text)} characters, which cannot fit into the context of {context} tokens; "
                "shorten it.",
                param,
            )


def fit(ids: list[int], context: int, params: SamplingParams, truncate: int | None, param: str) -> list[int]:
    """The prompt as it will run. One that is too long is truncated at its beginning if the call allows it, else
    refused."""
    if not ids:
        raise Refusal(f"{param} is empty: give at least one token.", param=param, code="empty_prompt")
    wanted = 1 if params.max_tokens is None else params.max_tokens
    if wanted >= context:
        raise ContextOverflow(
            f"max_tokens={wanted} leaves no room for a prompt in the context of {context} tokens; lower it.",
            "max_tokens",
        )
    if truncate is not None:
        ids = ids[-min(truncate if truncate > 0 else context, context - wanted) :]
    if len(ids) + wanted > context:
        asked = "" if params.max_tokens is None else f", with max_tokens={wanted} {len(ids) + wanted}"
        raise ContextOverflow(
            f"{param} has {len(ids)} tokens{asked}, but the context holds {context}; shorten it, lower max_tokens, or "
            "set truncate_prompt_tokens.",
            param,
        )
    refuse_bulk(logprob_entries(len(ids), params, context))
    return ids


def logprob_entries(prompt: int, params: SamplingParams, context: int) -> int:
    """Logprobs that the answer to one prompt may hold."""
    following = params.max_tokens if params.max_tokens is not None else min(context - prompt, USUAL_ANSWER)
    entries = 0 if params.logprobs is None else params.n * following * (params.logprobs + 1)
    return entries + (0 if params.prompt_logprobs is None else prompt * (params.prompt_logprobs + 1))


def refuse_bulk(entries: int) -> None:
    """Refuses too many logprobs: they are many times as large as their text. `entries`: of the whole call."""
    if entries > MAX_LOGPROB_ENTRIES:
        raise Refusal(
            f"The answer would hold {entries} log-probabilities, more than {MAX_LOGPROB_ENTRIES}: lower logprobs, "
            "prompt_logprobs, n or max_tokens.",
            param="logprobs",
            code="invalid_value",
        )


def finished(slices: Slices[Made]) -> Made:
    """The result of all slices, run at once."""
    try:
        while True:
            next(slices)
    except StopIteration as end:
        result: Made = end.value
        return result


def kept_tokens(truncate: int | None, context: int) -> int | None:
    """Number of a prompt's last tokens that are needed at most; None: all."""
    return None if truncate is None else min(truncate if truncate > 0 else context, context)


def _untold(made: Any, error: BaseException | None) -> None:
    """Placeholder for `tell` until the job is queued."""


def is_short(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a conversation has few messages, all plain and with little text."""
    values = [value for message in messages[:SHORT_CONVERSATION] for value in message.values()]
    if len(messages) > SHORT_CONVERSATION or not all(isinstance(value, str) for value in values):
        return False
    return sum(map(len, values)) <= SHORT_TEXT
