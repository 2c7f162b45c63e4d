"""Text that arrives by token is the text of all tokens, whole characters only."""

import unicodedata
from functools import cache

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from bankfull.errors import ModelError
from bankfull.text.detokenize import Detokenizer
from bankfull.text.tokenizer import Tokenizer
from tests.quick import examples
from tests.work import work_of

from .corpus import HOSTILE
from .models import SYMBOLS, chatml_tokenizer, sentencepiece_tokenizer


@cache
def words() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "<s>": 2, "?": 3}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<s>"])
    return Tokenizer(backend)


KINDS = {
    "byte-level": chatml_tokenizer,
    "sentencepiece": lambda: sentencepiece_tokenizer(True, tuple(SYMBOLS)),
    "sentencepiece without prefix": lambda: sentencepiece_tokenizer(False),
    "words": words,
}


@pytest.mark.parametrize("kind", KINDS)
@examples(400, deadline=None)
@given(data=st.data(), skip=st.booleans(), continuing=st.booleans())
def test_any_ids_in_any_split_give_the_decoded_whole(
    kind: str, data: st.DataObject, skip: bool, continuing: bool
) -> None:
    tokenizer = KINDS[kind]()
    low = st.integers(0, min(270, tokenizer.vocab_size - 1))  # bytes and special tokens live there
    ids = data.draw(st.lists(st.one_of(low, st.integers(0, tokenizer.vocab_size + 3)), max_size=40))
    stream = Detokenizer(tokenizer, skip, continuing=continuing)
    pieces = []
    rest = ids
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        pieces.append(stream.push(rest[:size]))
        rest = rest[size:]
    whole = tokenizer.decode(ids, skip_special=skip, continuing=continuing)
    assert "".join([*pieces, stream.finish()]) == whole


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_no_half_character_is_ever_emitted(kind: str) -> None:
    tokenizer = KINDS[kind]()
    for text in HOSTILE:
        stream = Detokenizer(tokenizer)
        pieces = [stream.push([id]) for id in tokenizer.encode(text, parse_special=False)]
        assert "".join(pieces) == text.replace("\u2581", " " if kind == "sentencepiece" else "\u2581")
        assert not any("\ufffd" in piece for piece in pieces)
        assert stream.finish() == ""


def test_a_character_that_never_ends_is_shown_at_the_end() -> None:
    tokenizer = chatml_tokenizer()
    first = tokenizer.encode("\U0001f600")[:1]
    stream = Detokenizer(tokenizer)
    assert stream.push(first) == ""
    assert stream.finish() == "\ufffd" == tokenizer.decode(first)


def test_the_leading_space_goes_once_and_only_at_a_beginning() -> None:
    tokenizer = sentencepiece_tokenizer()
    ids = tokenizer.encode("the river", add_bos=True)
    assert tokenizer.decode(ids) == "the river"
    assert tokenizer.decode(ids[1:], continuing=True) == " the river"
    assert tokenizer.decode(ids, skip_special=False) == "<s> the river"


def test_the_cost_is_linear() -> None:
    tokenizer = chatml_tokenizer()
    ids = tokenizer.encode("the river 日本 " * 200)

    def work(repeat: int) -> int:
        stream = Detokenizer(tokenizer)
        return work_of(lambda: [stream.push([id]) for _ in range(repeat) for id in ids])

    assert work(8) < 8.5 * work(1)


def test_words_are_set_apart() -> None:
    tokenizer = words()
    assert tokenizer.decode(tokenizer.encode("a b <s> a")) == "a b a"


def test_a_decoder_that_joins_otherwise_is_refused_by_name() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = tokenizers.decoders.WordPiece()
    with pytest.raises(ModelError, match="WordPiece"):
        Tokenizer(backend)


def test_corpus_reaches_beyond_the_basic_plane() -> None:
    assert any(ord(character) > 0xFFFF and unicodedata.category(character) == "So" for character in "".join(HOSTILE))
