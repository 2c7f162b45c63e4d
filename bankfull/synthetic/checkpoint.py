"""Writes a random model as a Hugging Face directory; one part of a tensor is in memory at a time."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bankfull.errors import ConfigError
from bankfull.synthetic.random_weights import RandomWeights, random_model
from bankfull.synthetic.vocabulary import FEWEST, ByteVocabulary
from bankfull.weights.fetch import Report
from bankfull.weights.formats.dense import DTYPES
from bankfull.weights.safetensors import INDEX, SINGLE

SHARD_BYTES = 4 << 30
"""Largest file of weights, unless one tensor is larger."""
SPARE_BYTES = 32 << 20
"""Room for the tokenizer and the configuration."""
STORED = {dtype: name.upper() for name, dtype in DTYPES.items()}
"""Names of dtypes in a safetensors file."""


@dataclass(frozen=True, slots=True)
class WrittenModel:
    path: Path
    """The model directory, or the .gguf file in it."""
    parameters: int
    weight_bytes: int
    tokenizer: bool
    """Whether a tokenizer was written; a vocabulary below 260 tokens has no room for all bytes."""


def write_checkpoint(
    name: str,
    config: Mapping[str, Any],
    folder: Path,
    dtype: torch.dtype,
    seed: int = 0,
    report: Report = lambda what, done, total: None,
) -> WrittenModel:
    """`folder` must not exist, or be empty; it appears when it is whole."""
    files = random_model(name, config, dtype, seed=seed)
    source = files.source
    assert isinstance(source, RandomWeights)
    sizes = {at: prod(source.shape(at)) * dtype.itemsize for at in source.names()}
    total = sum(sizes.values())
    vocabulary = byte_vocabulary(config)
    with new_folder(folder, total) as partial:
        shards = _shards(sizes)
        written = 0

        def advance(count: int) -> None:
            nonlocal written
            written += count
            report(f"Writing {name}", written, total)

        names = [SINGLE] if len(shards) == 1 else [_shard_name(i, len(shards)) for i in range(len(shards))]
        for file, tensors in zip(names, shards, strict=True):
            _write_shard(partial / file, tensors, source, dtype, advance)
        if len(shards) > 1:
            mapping = {at: file for file, tensors in zip(names, shards, strict=True) for at in tensors}
            index = {"metadata": {"total_size": total}, "weight_map": mapping}
            (partial / INDEX).write_text(json.dumps(index, indent=1))
        saved = dict(files.config)
        if vocabulary is not None:
            vocabulary.write(partial)
            saved |= vocabulary.ids()
        (partial / "config.json").write_text(json.dumps(saved, indent=1))
    return WrittenModel(folder, total // dtype.itemsize, total, vocabulary is not None)


def byte_vocabulary(config: Mapping[str, Any]) -> ByteVocabulary | None:
    """The vocabulary for a configuration; None if it is too small for all bytes."""
    size, mask = config.get("vocab_size"), config.get("mask_token_id")
    return ByteVocabulary(size, mask) if isinstance(size, int) and size >= FEWEST else None


@contextmanager
def new_folder(folder: Path, need: int) -> Iterator[Path]:
    """A folder to write to, renamed to `folder` at the end and deleted after an error. `need`: bytes of its files."""
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} exists already; delete it, or choose another directory.")
        folder.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder.parent).free
        if free < need + SPARE_BYTES:
            raise ConfigError(
                f"The model needs {need / 1e9:.1f} GB in {folder.parent}, but {free / 1e9:.1f} GB are free; make room, "
                "choose another directory, or shrink it with --layers or --scale tiny."
            )
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            yield partial
            os.replace(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror or error}; choose another directory.") from None


def _shards(sizes: Mapping[str, int]) -> list[list[str]]:
    """Tensors of each file, in the order in which the family requests them."""
    made: list[list[str]] = [[]]
    room = SHARD_BYTES
    for name, size in sizes.items():
        if size > room and made[-1]:
            made.append([])
            room = SHARD_BYTES
        made[-1].append(name)
        room -= size
    return made


def _shard_name(number: int, count: int) -> str:
    return f"model-{number + 1:05}-of-{count:05}.safetensors"


def _write_shard(
    path: Path, tensors: Sequence[str], source: RandomWeights, dtype: torch.dtype, advance: Callable[[int], None]
) -> None:
    """The format: length of the header (8 bytes), the header as JSON, the tensors' bytes in its order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in tensors:
        end = at + prod(source.shape(name)) * dtype.itemsize
        header[name] = {"dtype": STORED[dtype], "shape": list(source.shape(name)), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in tensors:
            for part in source.parts(name):
                advance(file.write(raw_bytes(part)))


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor on the CPU, without a copy."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
