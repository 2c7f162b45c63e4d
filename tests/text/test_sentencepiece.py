"""A SentencePiece vocabulary from GGUF metadata gives the ids and the texts of the sentencepiece package."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bankfull.errors import ModelError, RequestError
from bankfull.text.gguf import tokenizer_from_gguf
from tests.quick import examples

from .corpus import HOSTILE, planes, repetitive, training
from .models import SYMBOLS, sentencepiece_metadata, sentencepiece_model, sentencepiece_tokenizer

TEXTS = [*HOSTILE, *planes(), *repetitive(), *training(7)[:100]]
VARIANTS = [(prefix, symbols) for prefix in (True, False) for symbols in ((), tuple(SYMBOLS))]


@pytest.mark.parametrize(("prefix", "symbols"), VARIANTS)
def test_ids_equal_sentencepiece_on_hostile_text(prefix: bool, symbols: tuple[str, ...]) -> None:
    reference = sentencepiece_model(prefix, True, symbols)
    tokenizer = sentencepiece_tokenizer(prefix, symbols)
    for text in TEXTS:
        assert tokenizer.encode(text, add_bos=False, parse_special=False) == reference.encode(text), text


@pytest.mark.parametrize(("prefix", "symbols"), VARIANTS)
@examples(300, deadline=None)
@given(data=st.data())
def test_ids_equal_sentencepiece_on_random_text(prefix: bool, symbols: tuple[str, ...], data: st.DataObject) -> None:
    alphabet = st.one_of(
        st.characters(exclude_categories=["Cs"]), st.sampled_from("ab c the river"), st.sampled_from(SYMBOLS)
    )
    text = "".join(data.draw(st.lists(alphabet, max_size=60)))
    expected = sentencepiece_model(prefix, True, symbols).encode(text)
    assert sentencepiece_tokenizer(prefix, symbols).encode(text, add_bos=False, parse_special=False) == expected


def test_without_byte_pieces_an_unknown_run_is_one_unknown_token() -> None:
    reference = sentencepiece_model(True, False)
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata(reference, True))
    for text in [*HOSTILE, "a \U00012000\U00012001 b"]:
        assert tokenizer.encode(text, add_bos=False, parse_special=False) == reference.encode(text), text


@pytest.mark.parametrize(("prefix", "symbols"), VARIANTS)
def test_decoding_gives_the_text_back(prefix: bool, symbols: tuple[str, ...]) -> None:
    tokenizer, reference = sentencepiece_tokenizer(prefix, symbols), sentencepiece_model(prefix, True, symbols)
    for text in TEXTS:
        ids = tokenizer.encode(text, parse_special=False)
        assert tokenizer.decode(ids) == text.replace("\u2581", " ")
        assert tokenizer.decode(ids[1:]) == reference.decode(ids[1:]), text


def test_a_text_begins_with_one_bos() -> None:
    tokenizer = sentencepiece_tokenizer()
    plain = tokenizer.encode("the river", add_bos=False)
    assert tokenizer.encode("the river") == [1, *plain]
    assert tokenizer.encode("<s>the river") == [1, *plain]
    assert tokenizer.encode("the river", add_bos=True) == [1, *plain]
    assert tokenizer.encode("") == [1]


def test_each_text_after_a_control_token_has_its_own_space() -> None:
    tokenizer = sentencepiece_tokenizer()
    one, two = (tokenizer.encode(text, add_bos=False) for text in ("the river", "runs"))
    start, end = (tokenizer.backend.token_to_id(token) for token in ("<|im_start|>", "<|im_end|>"))
    assert tokenizer.encode("<|im_start|>the river<|im_end|>runs", add_bos=False) == [start, *one, end, *two]


def test_byte_pieces_are_bytes() -> None:
    tokenizer = sentencepiece_tokenizer()
    ids = tokenizer.encode("\U00012000", add_bos=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == " \U00012000".encode()
    assert {tokenizer.token_bytes(tokenizer.backend.token_to_id(f"<0x{byte:02X}>")) for byte in range(256)} == {
        bytes([byte]) for byte in range(256)
    }
    assert tokenizer.token_bytes(1) == b"<s>"
    assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""


def test_a_lone_surrogate_is_refused_in_one_sentence() -> None:
    with pytest.raises(RequestError, match=r"lone surrogate U\+D800 at character 3"):
        sentencepiece_tokenizer().encode("abc\ud800")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokenizer.ggml.model", "t5", "'t5'"),
        ("tokenizer.ggml.model", None, "names no tokenizer model"),
        ("tokenizer.ggml.tokens", None, "tokenizer.ggml.tokens"),
        ("tokenizer.ggml.tokens", "abc", "not a list"),
        ("tokenizer.ggml.tokens", [1, 2], "not a list of strings"),
        ("tokenizer.ggml.scores", [0.0], "not one number for each"),
        ("tokenizer.ggml.token_type", [1], "token types"),
        ("tokenizer.ggml.bos_token_id", 10**9, "outside its"),
        ("tokenizer.ggml.remove_extra_whitespaces", True, "repeated spaces"),
    ],
)
def test_damaged_metadata_is_refused_in_one_sentence(key: str, value: object, message: str) -> None:
    metadata = sentencepiece_metadata(sentencepiece_model(), True)
    metadata[key] = value
    if value is None:
        del metadata[key]
    with pytest.raises(ModelError, match=message):
        tokenizer_from_gguf(metadata)


def test_equal_scores_are_refused() -> None:
    metadata = sentencepiece_metadata(sentencepiece_model(), True)
    metadata["tokenizer.ggml.scores"] = [-1000.0] * len(metadata["tokenizer.ggml.tokens"])  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="same score"):
        tokenizer_from_gguf(metadata)


def test_a_token_listed_twice_is_refused() -> None:
    metadata = sentencepiece_metadata(sentencepiece_model(), True)
    tokens = list(metadata["tokenizer.ggml.tokens"])  # type: ignore[call-overload]
    tokens[-1] = tokens[-2]
    with pytest.raises(ModelError, match="twice"):
        tokenizer_from_gguf({**metadata, "tokenizer.ggml.tokens": tokens})
