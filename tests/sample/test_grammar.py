from __future__ import annotations

import contextlib
import functools
import json
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bankfull.errors import RequestError
from bankfull.sample import grammar
from bankfull.sample.grammar import DraftTokens, GrammarCompiler, MaskPool, Matcher
from bankfull.sample.logits import SamplingTable, sample
from bankfull.sample.params import SamplingParams, StructuredOutput
from tests.quick import examples
from tests.sample.batch import entering

TEXT = ['{"name": "Ada", "age": 36, "tags": ["x", "y"], "ok": true}', "red green 2024-05-17 (1 + 2) * 3", "größer ☂"]


@dataclass
class ByteLevel:
    """A small byte-level BPE with the face of the project's tokenizer."""

    backend: Tokenizer
    special_ids: tuple[int, ...] = (0, 1, 2)
    eos_ids: tuple[int, ...] = (0, 1)
    _bytes: dict[str, int] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        return int(self.backend.get_vocab_size())

    def token_bytes(self, token: int) -> bytes:
        if not self._bytes:
            # The printable stand-ins of byte-level BPE: printable Latin-1 bytes are themselves, the rest follow 256.
            plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
            rest = [byte for byte in range(256) if byte not in plain]
            self._bytes = {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(rest)}
        return bytes(self._bytes[char] for char in self.backend.id_to_token(token))

    def text(self, tokens: list[int]) -> str:
        return b"".join(self.token_bytes(token) for token in tokens if token not in self.special_ids).decode()


@functools.cache
def byte_level() -> ByteLevel:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<end>", "<turn>", "<pad>"],
        show_progress=False,
        min_frequency=1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(TEXT * 3, trainer)
    return ByteLevel(backend)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return wide_compiler()


@functools.cache
def wide_compiler() -> GrammarCompiler:
    return GrammarCompiler(byte_level(), vocab=512)


@pytest.fixture(scope="module")
def tokenizer() -> ByteLevel:
    return byte_level()


def bits(mask: NDArray[np.int32]) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def finish(matcher: Matcher, tokenizer: ByteLevel, seed: int) -> list[int]:
    """Random tokens under the masks; closing marks and the end are favoured, so that text ends soon."""
    bias: dict[int, float] = dict.fromkeys(tokenizer.eos_ids, 12.0)
    for mark, weight in (('"', 4.0), ("}", 5.0), ("]", 5.0), (",", 1.0), (" ", -3.0)):
        bias[tokenizer.backend.token_to_id("Ġ" if mark == " " else mark)] = weight
    table = SamplingTable(1, 512)
    params = SamplingParams(logit_bias=bias, temperature=2.0)
    table.set([entering(0, params, prompt_len=0, child=0, seed=seed, stop_ids=tokenizer.eos_ids)])
    out: list[int] = []
    held = torch.zeros(1, 1, dtype=torch.int64)
    for position in range(400):
        mask = torch.from_numpy(matcher.mask()).unsqueeze(0)
        chosen = sample(
            torch.zeros(1, 512),
            torch.zeros(1, dtype=torch.int64),
            table,
            held,
            torch.tensor([position]),
            mask,
            host_rows=[0],
        )
        token = int(chosen.tokens[0])
        assert token in bits(matcher.mask())
        matcher.advance(token)
        out.append(token)
        if token in tokenizer.eos_ids:
            assert matcher.finished
            return out
    raise AssertionError("no end after 400 tokens: " + tokenizer.text(out))


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 3},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def is_person(text: str) -> bool:
    value = json.loads(text)
    return (
        isinstance(value, dict)
        and {"name", "age"} <= set(value) <= {"name", "age", "tags", "ok"}
        and isinstance(value["name"], str)
        and len(value["name"]) <= 12
        and type(value["age"]) is int
        and 0 <= value["age"] <= 150
        and all(tag in ("x", "y") for tag in value.get("tags", []))
        and len(value.get("tags", [])) <= 3
        and value.get("ok", True) in (True, False)
    )


SUM = r"""
start: expr
expr: term | expr "+" term
term: NUMBER | "(" expr ")"
NUMBER: /[0-9]{1,3}/
"""


def is_sum(text: str) -> bool:
    shorter = re.sub(r"(?<![0-9])[0-9]{1,3}(?![0-9])", "n", text)
    while (again := shorter.replace("n+n", "n").replace("(n)", "n")) != shorter:
        shorter = again
    return shorter == "n"


CASES: list[tuple[StructuredOutput, Callable[[str], bool]]] = [
    (StructuredOutput(json=PERSON), is_person),
    (StructuredOutput(json=json.dumps(PERSON)), is_person),
    (
        StructuredOutput(regex=r"[0-9]{4}-[0-9]{2}-[0-9]{2}( [a-z]+)?"),
        lambda text: bool(re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}( [a-z]+)?", text)),
    ),
    (
        StructuredOutput(choice=["red", "green", 'qu"ote\n\\', "größer ☂", "re"]),
        lambda text: text in ("red", "green", 'qu"ote\n\\', "größer ☂", "re"),
    ),
    (StructuredOutput(grammar=SUM), is_sum),
]


@pytest.mark.parametrize(("structured", "holds"), CASES, ids=["dict", "schema", "regex", "choice", "lark"])
def test_text_made_of_allowed_tokens_has_the_asked_form(
    structured: StructuredOutput, holds: Callable[[str], bool], compiler: GrammarCompiler, tokenizer: ByteLevel
) -> None:
    texts = {tokenizer.text(finish(compiler.compile(structured), tokenizer, seed)) for seed in range(12)}
    assert all(holds(text) for text in texts), texts
    assert len(texts) > 2


def test_the_end_is_allowed_only_where_the_grammar_may_end(compiler: GrammarCompiler, tokenizer: ByteLevel) -> None:
    matcher = compiler.compile(StructuredOutput(regex="ab?"))
    a, b = (tokenizer.backend.token_to_id(char) for char in "ab")
    assert not bits(matcher.mask()) & set(tokenizer.eos_ids)
    matcher.advance(a)
    assert bits(matcher.mask()) == {b, *tokenizer.eos_ids} and not matcher.finished
    matcher.advance(b)
    assert matcher.finished and bits(matcher.mask()) == set(tokenizer.eos_ids)


@pytest.mark.parametrize("vocab", [512, 420, 333, 300])
def test_ids_beyond_tokenizer_or_model_are_never_allowed(tokenizer: ByteLevel, vocab: int) -> None:
    mask = GrammarCompiler(tokenizer, vocab=vocab).compile(StructuredOutput(regex=r"(.|\n)*")).mask()
    assert mask.shape == ((vocab + 31) // 32,) and mask.dtype == np.int32
    assert max(bits(mask)) < min(vocab, tokenizer.vocab_size)
    assert len(bits(mask)) > 100


def test_special_tokens_never_stand_for_their_text(compiler: GrammarCompiler, tokenizer: ByteLevel) -> None:
    pad = tokenizer.backend.token_to_id("<pad>")
    assert pad not in bits(compiler.compile(StructuredOutput(regex="<pad>")).mask())
    assert bits(compiler.compile(StructuredOutput(grammar="start: <pad>")).mask()) == {pad}
    assert tokenizer.backend.encode("<pad>").ids == [pad], "the request's own tokenizer must stay as it was"


class WithSpaceMarks(ByteLevel):
    """SentencePiece's habit: a mark for the space, and a space put before every text."""

    def token_bytes(self, token: int) -> bytes:
        return str(self.backend.id_to_token(token)).replace("\u2581", " ").encode()


def test_a_tokenizer_that_puts_a_space_before_everything_is_understood() -> None:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=60, special_tokens=["<end>", "<turn>", "<pad>"], show_progress=False, initial_alphabet=["\x02"]
    )
    backend.train_from_iterator(["red green reds greens"] * 3, trainer)
    spaced = WithSpaceMarks(backend)
    assert spaced.text(backend.encode("red").ids) == " red"
    for params in (StructuredOutput(regex="red greens"), StructuredOutput(choice=["reds green", " greens"])):
        compiler = GrammarCompiler(spaced)
        texts = set()
        for seed in range(6):
            matcher, out = compiler.compile(params), []
            chooser = np.random.default_rng(seed)
            while not matcher.finished:
                out.append(int(chooser.choice(sorted(bits(matcher.mask())))))
                matcher.advance(out[-1])
            texts.add(spaced.text(out))
        assert texts == ({"red greens"} if params.regex else {"reds green", " greens"})


def test_a_copy_goes_its_own_way(compiler: GrammarCompiler, tokenizer: ByteLevel) -> None:
    first = compiler.compile(StructuredOutput(choice=["ab", "ac"]))
    a, b, c = (tokenizer.backend.token_to_id(char) for char in "abc")
    first.advance(a)
    second = first.copy()
    assert first.accepts([b]) == 1 and first.accepts([a]) == 0
    first.advance(b)
    assert first.finished and not second.finished and {b, c} <= bits(second.mask())


@pytest.mark.parametrize(
    ("structured", "reason"),
    [
        ({"regex": "a(b"}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"grammar": "start: nothing"}, "nothing"),
        ({"grammar": ""}, "Empty grammar"),
        ({"grammar": "start: <|unknown|>"}, "<|unknown|>"),
        ({"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000}, "nested"),
        ({"json": '{"type":'}, "not JSON"),
        ({"json": "[" * 100_000}, "structured.json"),
        ({"json": "[]"}, "object or boolean"),
        ({"json": {"type": "objekt"}}, "objekt"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"$ref": "http://example.org/schema"}}, "example.org"),
    ],
)
def test_an_unreadable_grammar_is_refused_in_one_sentence(
    structured: dict[str, Any], reason: str, compiler: GrammarCompiler
) -> None:
    with pytest.raises(RequestError) as refused:
        compiler.compile(StructuredOutput(**structured))
    message = str(refused.value)
    assert reason in message and f"structured.{next(iter(structured))}" in message
    assert "\n" not in message and message.endswith(".") and len(message) < 450


@pytest.mark.parametrize("form", ["rules", "references"])
def test_a_chain_of_rules_as_long_as_the_limit_allows_does_not_end_the_process(
    form: str, compiler: GrammarCompiler
) -> None:
    if form == "rules":
        links = "\n".join(f"a{i:x}:a{i + 1:x}" for i in range(70_000))
        structured = StructuredOutput(grammar=f'start: a0\n{links}\na{70_000:x}:"x"')
    else:
        links = ",".join(f'"{i:x}":{{"$ref":"#/$defs/{i + 1:x}"}}' for i in range(30_000))
        structured = StructuredOutput(json=f'{{"$ref":"#/$defs/0","$defs":{{{links},"{30_000:x}":{{"type":"null"}}}}}}')
    with contextlib.suppress(RequestError):
        assert compiler.compile(structured).mask().any()


def test_a_forbidden_or_missing_token_fails_the_request_and_nothing_else(compiler: GrammarCompiler) -> None:
    for token in (5, -1, 511, 10**6):
        matcher = compiler.compile(StructuredOutput(regex="\\(x"))
        with pytest.raises(RequestError, match="grammar") as refused:
            matcher.advance(token)
        assert "\n" not in str(refused.value)


def test_one_grammar_is_compiled_once_even_when_asked_for_at_once(
    tokenizer: ByteLevel, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(tokenizer)
    built: list[StructuredOutput] = []
    build = compiler._build
    monkeypatch.setattr(compiler, "_build", lambda params: (built.append(params), build(params))[1])
    params = StructuredOutput(choice=["yes", "no"])
    found: list[set[int]] = []
    threads = [threading.Thread(target=lambda: found.append(bits(compiler.compile(params).mask()))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1 and len(found) == 8 and all(mask == found[0] for mask in found)


def test_the_cache_forgets_the_oldest_and_never_keeps_a_failure(
    tokenizer: ByteLevel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "_CACHED_GRAMMARS", 2)
    compiler = GrammarCompiler(tokenizer)
    for _ in range(2):
        with pytest.raises(RequestError):
            compiler.compile(StructuredOutput(regex="("))
    for text in ("a", "b", "a", "c"):
        compiler.compile(StructuredOutput(regex=text))
    assert list(compiler._made) == [("regex", "a"), ("regex", "c")]


def test_masks_from_the_pool_are_the_masks(compiler: GrammarCompiler) -> None:
    matchers = [compiler.compile(structured) for structured, _ in CASES for _ in range(3)]
    pool = MaskPool(threads=3)
    try:
        futures = [pool.submit(matcher) for matcher in matchers]
        for matcher, future in zip(matchers, futures, strict=True):
            assert (future.result() == matcher.mask()).all()
    finally:
        pool.close()


def test_a_missing_llguidance_is_named(tokenizer: ByteLevel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match="package llguidance: install"):
        GrammarCompiler(tokenizer).compile(StructuredOutput(regex="a"))


def test_a_tokenizer_without_an_end_token_is_named(tokenizer: ByteLevel) -> None:
    with pytest.raises(RequestError, match="end token"):
        GrammarCompiler(ByteLevel(tokenizer.backend, eos_ids=())).compile(StructuredOutput(regex="a"))


def test_llguidance_is_not_loaded_before_it_is_needed() -> None:
    code = "import sys, bankfull.sample.grammar; assert not {'llguidance', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("structured", "holds"), CASES, ids=["dict", "schema", "regex", "choice", "lark"])
def test_masks_along_a_tree_are_those_of_fresh_matchers(
    structured: StructuredOutput, holds: Callable[[str], bool], compiler: GrammarCompiler, tokenizer: ByteLevel
) -> None:
    """Trees of tokens that the grammar allows, of others, and of those that complete it."""
    rng = random.Random(3)
    right = finish(compiler.compile(structured), tokenizer, 1)
    for begun in range(min(4, len(right))):
        matcher = compiler.compile(structured)
        for token in right[:begun]:
            matcher.advance(token)
        if matcher.finished:
            break  # the engine has ended the sequence
        tokens, parents, paths = [], [], []
        for node in range(24):
            parent = rng.randrange(-1, node)
            path = [] if parent < 0 else paths[parent]
            following = right[begun + len(path) : begun + len(path) + 1] or [rng.randrange(512)]
            tokens.append(rng.choice((following[0], rng.randrange(512))))
            parents.append(parent)
            paths.append([*path, tokens[-1]])
        masks = matcher.masks_along(DraftTokens(tokens, parents))
        assert bits(masks[0]) == bits(matcher.mask())
        for path, mask in zip(paths, masks[1:], strict=True):
            fresh = compiler.compile(structured)
            for token in right[:begun]:
                fresh.advance(token)
            allowed = True
            for token in path:
                if not (allowed and fresh.finished):
                    allowed = allowed and token in bits(fresh.mask())
                    if allowed:
                        fresh.advance(token)
            complete = allowed and fresh.finished
            assert bits(mask) == (set(range(512)) if complete else bits(fresh.mask()) if allowed else set())
        for token in right[begun:]:
            matcher.advance(token)  # the position has not changed
        assert matcher.finished == (len(right) > 0 and compiler_finished(compiler, structured, right))


PIECES = st.sampled_from(["a", "red", "[0-9]", "[a-c]{1,2}", "(x|yes)", "b?", "(12)?", '"', "\n", "ö"])


@examples(200)
@given(st.lists(PIECES, min_size=1, max_size=4), st.integers(1, 24), st.randoms(use_true_random=False))
def test_every_line_that_accepted_drafts_lead_to_has_a_token_left(
    pieces: list[str], drafts: int, rng: random.Random
) -> None:
    """Drafts follow the grammar and leave it, go on behind its end, and are ids of the model alone, or none at all."""
    tokenizer, compiler = byte_level(), wide_compiler()
    matcher = compiler.compile(StructuredOutput(regex="".join(pieces)))
    for _ in range(rng.randrange(3)):
        ahead = matcher.copy()
        ahead.advance(rng.choice(sorted(bits(ahead.mask()))))
        if not ahead.finished:
            matcher = ahead
    tokens, parents, walks = [], [], {-1: matcher}
    for draft in range(drafts):
        parent = rng.choice((draft - 1, rng.randrange(-1, draft)))
        walk = walks[parent].copy()
        follows = [] if walk.finished else sorted(bits(walk.mask()))
        strange = (rng.randrange(512), rng.randrange(tokenizer.vocab_size, 512), -1, 511)
        tokens.append(rng.choice((rng.choice(follows or strange), rng.choice(follows or strange), rng.choice(strange))))
        parents.append(parent)
        if tokens[-1] in follows:
            walk.advance(tokens[-1])
        walks[draft] = walk
    masks = matcher.masks_along(DraftTokens(tokens, parents))
    reached, behind = {-1: True}, {-1: False}
    for draft, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        reached[draft] = reached[parent] and token in bits(masks[parent + 1])
        behind[draft] = reached[draft] and (behind[parent] or ends_by(walks[parent], token))
        assert not reached[draft] or bits(masks[draft + 1])
        assert not behind[draft] or bits(masks[draft + 1]) == set(range(512))


def ends_by(matcher: Matcher, token: int) -> bool:
    after = matcher.copy()
    if token not in bits(after.mask()):
        return False
    after.advance(token)
    return after.finished


def test_a_draft_where_the_grammar_cannot_go_on_ends_only_a_sequence_that_goes_there(
    compiler: GrammarCompiler, tokenizer: ByteLevel, monkeypatch: pytest.MonkeyPatch
) -> None:
    matcher = compiler.compile(StructuredOutput(regex="[ab]x"))
    a, b = (tokenizer.backend.token_to_id(letter) for letter in "ab")
    advance = Matcher.advance

    def breaks(self: Matcher, token: int) -> None:
        if token == a:
            raise RequestError("too many states")
        advance(self, token)

    monkeypatch.setattr(Matcher, "advance", breaks)
    masks = matcher.masks_along(DraftTokens([a, b], [-1, -1]))
    assert {a, b} <= bits(masks[0]) and bits(masks[1]) == set() and bits(masks[2])


def compiler_finished(compiler: GrammarCompiler, structured: StructuredOutput, tokens: list[int]) -> bool:
    matcher = compiler.compile(structured)
    for token in tokens:
        matcher.advance(token)
    return matcher.finished
