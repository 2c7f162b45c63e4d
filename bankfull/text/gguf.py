"""The tokenizer of a GGUF file, from its metadata.

Two kinds of vocabulary: "gpt2" (byte-level pieces and a merge list) and "llama" (SentencePiece pieces with scores).

End tokens: the ids that the file declares as end of text, turn or message, and every control token whose name is in
`END_NAMES`, because many files declare only one of their model's end tokens. One exception: if both <|return|> and
<|call|> exist, <|end|> only closes a message, and generation continues.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tokenizers
from tokenizers import decoders, models

from bankfull.errors import ModelError
from bankfull.text.pretokenize import family_named
from bankfull.text.spm import sentencepiece_backend
from bankfull.text.tokenizer import Tokenizer
from bankfull.text.vocabulary import GgufVocabulary, Kind, sequence

END_NAMES = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<EOT>",
        "[EOT]",
        "<|return|>",
        "<|call|>",
        "<｜end▁of▁sentence｜>",
        "</s>",
    }
)
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def tokenizer_from_gguf(metadata: Mapping[str, object]) -> Tokenizer:
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        return _byte_level(metadata)
    if model == "llama":
        return _sentencepiece(metadata)
    given = "names no tokenizer model" if model is None else f"has a tokenizer of model {model!r}"
    raise ModelError(
        f"the GGUF file {given} (tokenizer.ggml.model), and only 'gpt2' (byte-level BPE) and 'llama' (SentencePiece "
        "BPE) are supported: use a file of one of these, or the model's tokenizer.json"
    )


def _byte_level(metadata: Mapping[str, object]) -> Tokenizer:
    family = family_named(metadata.get("tokenizer.ggml.pre"))
    vocabulary = GgufVocabulary(metadata, searched_normalised=False)
    merges = _pairs(sequence(metadata, "tokenizer.ggml.merges"))
    try:
        model = models.BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=family.whole_words)
    except Exception as error:  # the library raises plain Exceptions
        raise ModelError(
            f"the merges of the GGUF file do not fit its tokens ({error}): convert the model again"
        ) from None
    backend = tokenizers.Tokenizer(model)
    normalizer = family.normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = family.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    vocabulary.add_to(backend)
    return Tokenizer(
        backend,
        bos_id=_id(metadata, "bos_token_id", vocabulary),
        eos_ids=_ends(metadata, vocabulary),
        add_bos=_flag(metadata, "add_bos_token", family.add_bos),
        vocab_size=len(vocabulary),
        unused_ids=vocabulary.unused,
    )


def _sentencepiece(metadata: Mapping[str, object]) -> Tokenizer:
    vocabulary = GgufVocabulary(metadata, searched_normalised=True)
    scores = sequence(metadata, "tokenizer.ggml.scores")
    if len(scores) != len(vocabulary) or not all(isinstance(score, (int, float)) for score in scores):
        raise ModelError(
            f"tokenizer.ggml.scores of the GGUF file is not one number for each of its {len(vocabulary)} tokens: the "
            "file is damaged"
        )
    if _flag(metadata, "remove_extra_whitespaces", False):
        raise ModelError(
            "the GGUF file asks to remove repeated spaces (tokenizer.ggml.remove_extra_whitespaces), which is not "
            "supported for SentencePiece BPE: use the model's tokenizer.json"
        )
    space_prefix = _flag(metadata, "add_space_prefix", True)
    # Files without these ids mean SentencePiece's defaults.
    bos_id = _id(metadata, "bos_token_id", vocabulary, 1)
    return Tokenizer(
        sentencepiece_backend(vocabulary, [float(score) for score in scores], space_prefix=space_prefix),  # type: ignore[arg-type]
        bos_id=bos_id,
        eos_ids=_ends(metadata, vocabulary, 2),
        add_bos=_flag(metadata, "add_bos_token", True),
        space_prefix=space_prefix,
        vocab_size=len(vocabulary),
        unused_ids=vocabulary.unused,
    )


def _pairs(merges: Sequence[object]) -> list[tuple[str, str]]:
    # No piece contains a space: a byte-level vocabulary maps it to another character.
    parts = [str(merge).partition(" ") for merge in merges]
    for merge, (left, _, right) in zip(merges, parts, strict=True):
        if not (left and right) or " " in right:
            raise ModelError(
                f"the merge {merge!r} of the GGUF file is not two pieces and a space: convert the model again"
            )
    return [(left, right) for left, _, right in parts]


def _ends(metadata: Mapping[str, object], vocabulary: GgufVocabulary, default: int | None = None) -> set[int]:
    declared = {_id(metadata, key, vocabulary, default if key == "eos_token_id" else None) for key in _END_KEYS}
    named = END_NAMES.intersection(vocabulary.of(Kind.CONTROL))
    if {"<|return|>", "<|call|>"} <= named:
        named -= {"<|end|>"}
    return {id for id in declared if id is not None} | {vocabulary.ids[token] for token in named}


def _id(metadata: Mapping[str, object], key: str, vocabulary: GgufVocabulary, default: int | None = None) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{key}", default)
    if value is None:
        return None
    try:
        id = int(str(value))
    except ValueError:
        id = -1
    if 0 <= id < len(vocabulary):
        return id
    raise ModelError(
        f"tokenizer.ggml.{key} of the GGUF file is {value!r}, outside its {len(vocabulary)} tokens: convert the "
        "model again"
    )


def _flag(metadata: Mapping[str, object], key: str, default: bool) -> bool:
    return bool(metadata.get(f"tokenizer.ggml.{key}", default))
