"""Tokenizers of trained models: words of a synthetic task, bytes, or that of another model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import Tensor

from bankfull.errors import ConfigError, ModelError
from bankfull.text.load import load_tokenizer
from bankfull.text.pieces import byte_level_alphabet
from bankfull.weights.locate import locate
from bankfull.weights.text_files import open_text_files

LARGEST_TEXT = 1 << 30
"""Bytes of a text file, at most."""


def word_tokenizer(words: Sequence[str]) -> dict[str, Any]:
    """tokenizer.json of a task's tokens: words between spaces."""
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: id for id, word in enumerate(words)}, unk_token=words[0])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return _as_json(backend)


def byte_tokenizer() -> dict[str, Any]:
    """tokenizer.json of bytes: token i is byte i."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=byte_level_alphabet(), merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return _as_json(backend)


@dataclass(frozen=True, slots=True)
class EncodedText:
    ids: Tensor
    digest: str
    """Digest of the text and the tokenizer."""
    tokenizer: dict[str, Any]
    """Content of tokenizer.json."""


def encoded_text(path: Path, model: str | None, vocab: int) -> EncodedText:
    """The tokens of a text file: bytes, or by the tokenizer of `model`."""
    try:
        if path.stat().st_size > LARGEST_TEXT:
            raise ConfigError(f"{path} is larger than {LARGEST_TEXT >> 20} MiB; give a shorter text.")
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}; give another text.") from None
    if model is None:
        ids, tokenizer = torch.frombuffer(bytearray(data), dtype=torch.uint8).long(), byte_tokenizer()
    else:
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}); convert it first.") from None
        backend = load_tokenizer(open_text_files(locate(model)))[0].backend
        ids, tokenizer = torch.tensor(backend.encode(text, add_special_tokens=False).ids), _as_json(backend)
    if len(ids) and int(ids.max()) >= vocab:
        raise ModelError(
            f"The text has token {int(ids.max())}, and the configuration's vocab_size is {vocab}; enlarge it."
        )
    digest = hashlib.sha256(data + json.dumps(tokenizer, sort_keys=True).encode()).hexdigest()[:16]
    return EncodedText(ids, digest, tokenizer)


def _as_json(backend: tokenizers.Tokenizer) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(backend.to_str())
    return document
