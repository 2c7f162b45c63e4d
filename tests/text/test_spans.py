"""What is proven about a tokenizer's lengths holds: cut texts have the same ids, and no token covers more."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import tokenizers
from tokenizers import normalizers, pre_tokenizers

from bankfull.text import windows as windows_module
from bankfull.text.pretokenize import FAMILIES
from bankfull.text.spans import spans_of
from bankfull.text.tokenizer import Tokenizer
from bankfull.text.windows import last_windows, windows
from tests.text.corpus import HOSTILE, planes, repetitive, training
from tests.text.models import SYMBOLS, byte_level, sentencepiece_tokenizer


def texts(seed: int) -> Iterator[str]:
    """Hostile parts glued together in any order, with words that may be cut between them."""
    rng = random.Random(seed)
    parts = [*HOSTILE, *planes(seed, 17), *repetitive(seed, 20)]
    parts += ["one two", "\nnext line\nand", "x  y \n z", "naïve 日本 語"]
    for _ in range(12):
        yield "".join(rng.choice(["", " ", "\n", " a "]) + rng.choice(parts) for _ in range(40)).replace("\x00", "")


def tokenizers_of_every_kind() -> dict[str, Tokenizer]:
    made = {}
    for name, family in FAMILIES.items():
        if family not in {FAMILIES[known] for known in made}:
            made[name] = Tokenizer(byte_level(family.pre_tokenizer(), family.normalizer(), family.whole_words))
    for prefix in (True, False):
        made[f"sentencepiece {prefix}"] = sentencepiece_tokenizer(prefix)
    return made


@pytest.fixture(scope="module")
def every_kind() -> dict[str, Tokenizer]:
    return tokenizers_of_every_kind()


def test_windows_have_the_ids_of_the_whole(every_kind: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows_module, "WINDOW", 24)
    for name, words in every_kind.items():
        assert words.spans.cut is not None, name
        cut = 0
        for text in texts(len(name)):
            ready = words.spelled(text)
            whole = words.encode_spelled(ready, None)
            parts = list(windows(ready, words.spans))
            cut += len(parts) - 1
            assert "".join(parts) == ready
            assert [id for part in parts for id in words.encode_spelled(part, None)] == whole, name
            backwards = list(last_windows(ready, words.spans))[::-1]
            assert "".join(backwards) == ready
            assert [id for part in backwards for id in words.encode_spelled(part, None)] == whole, name
        assert cut > 50, f"{name}: too little was cut to prove anything"


def test_no_text_has_fewer_tokens_than_its_length_says(every_kind: dict[str, Tokenizer]) -> None:
    for name, words in every_kind.items():
        longest = words.spans.longest
        assert longest is not None, name
        best = max(words.backend.get_vocab(), key=len)
        longest_text = words.decode([words.backend.token_to_id(best)])
        for text in [*texts(3), *training()[:50], longest_text * 50, "e\u0301\u0302" * 99]:
            tokens = len(words.encode(text, add_bos=False))
            assert not words.spans.exceeds(text, tokens), (name, text[:50])
        assert words.spans.exceeds("é" * (10 * longest + 1), 10)


def test_characters_that_cost_nothing_are_not_counted() -> None:
    backend = byte_level(FAMILIES["gpt-2"].pre_tokenizer())
    vocabulary = {token: id for token, id in backend.get_vocab().items() if token != "\u0104"}  # stands for byte 4
    lacking = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    lacking.pre_tokenizer, lacking.decoder = backend.pre_tokenizer, backend.decoder
    words = Tokenizer(lacking)
    assert words.spans.free == "\x04" and words.encode("\x04" * 5000) == []
    assert not words.spans.exceeds("\x04" * 5000, 0)
    lacking.add_tokens([tokenizers.AddedToken("<eats>", rstrip=True, special=True, normalized=False)])
    eating = Tokenizer(lacking)
    assert len(eating.encode("<eats>" + " " * 5000)) == 1
    assert not eating.spans.exceeds("<eats>" + " " * 5000, 1)


@pytest.mark.parametrize(
    ("normalizer", "pre"),
    [
        (normalizers.Strip(), None),
        (normalizers.Replace(tokenizers.Regex(" +"), " "), None),
        (None, pre_tokenizers.Whitespace()),
        (None, pre_tokenizers.Split(tokenizers.Regex("x"), "removed")),
    ],
)
def test_what_is_not_known_proves_nothing(
    normalizer: normalizers.Normalizer | None, pre: pre_tokenizers.PreTokenizer | None
) -> None:
    steps = [] if pre is None else [pre]
    words = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    spans = spans_of(byte_level(words, normalizer))
    assert spans.longest is None and spans.cut is None


@pytest.mark.parametrize("token", ["two words", "eats ", "\n", "a\nb"])
def test_a_token_that_reaches_over_a_cut_forbids_cutting(token: str) -> None:
    backend = byte_level(FAMILIES["gpt-2"].pre_tokenizer())
    assert spans_of(backend).cut is not None
    backend.add_tokens([tokenizers.AddedToken(token, normalized=False)])
    assert spans_of(backend).cut is None


def test_sentencepiece_symbols_of_several_marks_may_stay() -> None:
    words = sentencepiece_tokenizer(True, tuple(SYMBOLS))
    ready = words.spelled("one two\u2581\u2581three  four [INST] five six")
    places = [place for place in range(1, len(ready)) if words.spans.next_cut(ready, place, place + 1) == place]
    assert [ready[place - 1 : place + 2] for place in places] == ["e t", "e s"]
    for place in places:
        parts = words.encode_spelled(ready[:place], None) + words.encode_spelled(ready[place:], None)
        assert parts == words.encode_spelled(ready, None)
