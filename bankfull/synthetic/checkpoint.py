"""Writes a random model as a Hugging Face directory; a few parts of tensors are in memory at a time."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bankfull.errors import ConfigError
from bankfull.synthetic.ahead import ahead
from bankfull.synthetic.random_weights import RandomWeights, random_model
from bankfull.synthetic.vocabulary import FEWEST, ByteVocabulary
from bankfull.weights.conv1d import is_stored_transposed
from bankfull.weights.fetch import Report
from bankfull.weights.writing.output import PlannedFile, raw_bytes
from bankfull.weights.writing.shards import StoredPart, index_of, planned_shards

SHARD_BYTES = 4 << 30
"""Largest file of weights, unless one tensor is larger."""
SPARE_BYTES = 32 << 20
"""Room for the tokenizer and the configuration."""


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
    turned = {at for at in source.names() if is_stored_transposed(files.config, at)}
    shapes = {at: source.shape(at)[::-1] if at in turned else source.shape(at) for at in source.names()}
    planned = planned_shards([StoredPart(at, dtype, shape) for at, shape in shapes.items()], SHARD_BYTES)
    total = sum(place.nbytes for file in planned for place in file.places)
    vocabulary = byte_vocabulary(config)
    with new_folder(folder, total) as partial:
        written = 0

        def advance(count: int) -> None:
            nonlocal written
            written += count
            report(f"Writing {name}", written, total)

        for file in planned:
            _write_shard(partial / file.name, file, source, turned, advance)
        if (index := index_of(planned)) is not None:
            (partial / index[0]).write_text(index[1])
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


def _write_shard(
    path: Path, planned: PlannedFile, source: RandomWeights, turned: Collection[str], advance: Callable[[int], None]
) -> None:
    def turn(name: str) -> Tensor:
        return source.get(name).parts["data"].T.contiguous()

    def parts() -> Iterator[Callable[[], Tensor]]:
        for place in planned.places:
            if place.name in turned:
                yield partial(turn, place.name)
            else:
                yield from source.draws(place.name)

    with path.open("xb") as file:
        file.write(planned.head)
        for part in ahead(parts()):
            advance(file.write(raw_bytes(part)))
