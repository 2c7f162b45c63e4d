"""A byte-level vocabulary from GGUF metadata gives the ids of the tokenizer.json that it was made from."""

import pytest
import tokenizers
from tokenizers import normalizers, pre_tokenizers

from bankfull.errors import ModelError, RequestError
from bankfull.text.gguf import tokenizer_from_gguf
from bankfull.text.pretokenize import FAMILIES

from .corpus import HOSTILE, planes, repetitive, training
from .models import byte_level, byte_level_metadata, chatml_tokenizer, split_then_bytes

TEXTS = [*HOSTILE, *planes(), *repetitive(), *training(7)[:100]]

# The pre-tokenizers as the models' own tokenizer.json files have them.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2])
NFC = normalizers.NFC()
REFERENCES: dict[str, tuple[pre_tokenizers.PreTokenizer, normalizers.Normalizer | None, bool]] = {
    "gpt-2": (GPT2, None, False),
    "phi-2": (GPT2, None, False),
    "smollm": (DIGITS, None, False),
    "starcoder": (DIGITS, None, False),
    "command-r": (DIGITS, NFC, False),
    "llama-bpe": (split_then_bytes(LLAMA3), None, True),
    "smaug-bpe": (split_then_bytes(LLAMA3), None, False),
    "dbrx": (split_then_bytes(LLAMA3), None, False),
    "qwen2": (split_then_bytes(QWEN2), NFC, False),
    "deepseek-r1-qwen": (split_then_bytes(QWEN2), None, False),
    "tekken": (split_then_bytes(TEKKEN), None, True),
    "gpt-4o": (split_then_bytes(GPT4O), None, False),
    "llama4": (split_then_bytes(GPT4O), None, False),
    "deepseek-v3": (split_then_bytes(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3), None, False),
    "bloom": (split_then_bytes(" ?[^(\\s|.,!?…。，、।۔،)]+"), None, False),
}


@pytest.mark.parametrize("pre", REFERENCES)
def test_ids_equal_the_tokenizer_json_of_the_family(pre: str) -> None:
    cut, normalizer, ignore_merges = REFERENCES[pre]
    reference = byte_level(cut, normalizer, ignore_merges)
    tokenizer = tokenizer_from_gguf(byte_level_metadata(reference, pre))
    for text in TEXTS:
        ids = reference.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_bos=False) == ids, text
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
        assert tokenizer.decode(ids, skip_special=False) == reference.decode(ids, skip_special_tokens=False)


def test_families_differ_where_they_should() -> None:
    seen = {}
    for pre in ("default", "gpt-2", "smollm", "llama-bpe", "qwen2", "tekken", "gpt-4o", "deepseek-v3", "bloom"):
        cut = FAMILIES[pre].pre_tokenizer()
        seen[pre] = tuple(word for word, _ in cut.pre_tokenize_str("It's CamelCase 12345!\n\n  x/y, a`b c日本d"))
    assert len(set(seen.values())) == len(seen)


@pytest.mark.parametrize("pre", sorted(FAMILIES))
def test_every_known_family_gives_each_text_back(pre: str) -> None:
    backend = byte_level(FAMILIES[pre].pre_tokenizer(), FAMILIES[pre].normalizer())
    tokenizer = tokenizer_from_gguf(byte_level_metadata(backend, pre))
    for text in TEXTS[:40]:
        expected = text if not FAMILIES[pre].nfc else normalizers.NFC().normalize_str(text)
        assert tokenizer.decode(tokenizer.encode(text, add_bos=False), skip_special=False) == expected


def test_an_unknown_family_is_named_with_the_known_ones() -> None:
    metadata = byte_level_metadata(byte_level(GPT2), "made-up")
    with pytest.raises(ModelError, match=r"'made-up'.*gpt-2.*llama-bpe.*qwen2.*smollm"):
        tokenizer_from_gguf(metadata)
    del metadata["tokenizer.ggml.pre"]
    with pytest.raises(ModelError, match="names no pre-tokenizer"):
        tokenizer_from_gguf(metadata)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokenizer.ggml.merges", ["a"], "two pieces"),
        ("tokenizer.ggml.merges", ["\u0120t \u0120\u0120unknown"], "do not fit"),
        ("tokenizer.ggml.token_type", [9] * 10_000, "token types"),
        ("tokenizer.ggml.eos_token_id", -1, "outside its"),
    ],
)
def test_damaged_metadata_is_refused_in_one_sentence(key: str, value: object, message: str) -> None:
    metadata = byte_level_metadata(byte_level(GPT2), "gpt-2")
    with pytest.raises(ModelError, match=message):
        tokenizer_from_gguf({**metadata, key: value})


def test_bos_is_added_by_the_file_or_by_the_family() -> None:
    backend = byte_level(GPT2)

    def first(pre: str, **flags: object) -> int:
        more = {f"tokenizer.ggml.{key}": value for key, value in flags.items()}
        return tokenizer_from_gguf({**byte_level_metadata(backend, pre), **more}).encode("a")[0]

    assert first("gpt-2") != 1
    assert first("gpt-2", add_bos_token=True) == 1
    assert first("llama-bpe") == 1
    assert first("llama-bpe", add_bos_token=False) != 1


def test_all_end_tokens_end_a_text() -> None:
    metadata = byte_level_metadata(byte_level(GPT2), "gpt-2")
    assert tokenizer_from_gguf(metadata).eos_ids == {0, 2}
    tokens = list(metadata["tokenizer.ggml.tokens"])  # type: ignore[call-overload]
    kinds = list(metadata["tokenizer.ggml.token_type"])  # type: ignore[call-overload]
    last = len(tokens)
    for kind, names in ((3, ["<|end|>", "<eot>", "<eom>"]), (1, ["<end_of_turn>"])):
        tokens += names
        kinds += [kind] * len(names)
    more = {**metadata, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    more |= {"tokenizer.ggml.eot_token_id": last + 1, "tokenizer.ggml.eom_token_id": last + 2}
    assert tokenizer_from_gguf(more).eos_ids == {0, 2, last, last + 1, last + 2}
    more["tokenizer.ggml.tokens"] = [*tokens, "<|return|>", "<|call|>"]
    more["tokenizer.ggml.token_type"] = [*kinds, 3, 3]
    assert last not in tokenizer_from_gguf(more).eos_ids


def test_a_special_token_spelled_in_text_is_text_on_request() -> None:
    tokenizer = chatml_tokenizer()
    text = "a<|im_start|>user\n<think> <|im_end|>b"
    special = tokenizer.encode(text)
    plain = tokenizer.encode(text, parse_special=False)
    assert {1, 2} <= set(special)
    assert not tokenizer.special_ids & set(plain)
    assert tokenizer.backend.token_to_id("<think>") in plain  # a user-defined symbol is text, and stays one token
    assert tokenizer.decode(plain) == text
    clone = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    clone.encode_special_tokens = True
    for text in TEXTS:
        assert tokenizer.encode(text, parse_special=False) == clone.encode(text, add_special_tokens=False).ids


def test_the_marker_never_meets_a_text_that_contains_it() -> None:
    tokenizer = chatml_tokenizer()
    for text in ("\ufdd0<|im_end|>", "".join(map(chr, range(0xFDD0, 0xFDF0))) + "<|im_end|>"):
        assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == text
    pairs = "".join(chr(plane << 16 | low) for plane in range(17) for low in (0xFFFE, 0xFFFF))
    everything = "".join(map(chr, range(0xFDD0, 0xFDF0))) + pairs
    with pytest.raises(RequestError, match="66"):
        tokenizer.encode(everything + "<|im_end|>", parse_special=False)


def test_token_bytes_join_to_the_bytes_of_the_text() -> None:
    tokenizer = chatml_tokenizer()
    for text in TEXTS:
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()
    with pytest.raises(RequestError, match="-1"):
        tokenizer.token_bytes(-1)


def test_unused_ids_of_a_file_stand_for_no_text() -> None:
    """Those that fill the embedding, as converters write them, and those without a name."""
    metadata = byte_level_metadata(byte_level(GPT2), "gpt-2")
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list) and isinstance(kinds, list)
    unused, nameless = len(tokens), len(tokens) + 1
    more = {"tokenizer.ggml.tokens": [*tokens, f"[PAD{unused}]", ""], "tokenizer.ggml.token_type": [*kinds, 5, 1]}
    padded = tokenizer_from_gguf(metadata | more)
    assert padded.decode([unused, *padded.encode("the river"), nameless]) == "the river"
    assert padded.first_other_token(tokenizer_from_gguf(metadata)) is None
