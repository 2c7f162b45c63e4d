"""Safetensors files of a model: which tensor is where, before any of them exists."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from bankfull.weights.formats.dense import DTYPES
from bankfull.weights.safetensors import INDEX, SINGLE
from bankfull.weights.writing.output import Place, PlannedFile

SHARD_BYTES = 4 << 30
"""Largest file of weights, unless one tensor is larger."""
STORED = {dtype: name.upper() for name, dtype in DTYPES.items()} | {
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
}
"""Names of dtypes in a safetensors file."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A tensor of the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def planned_shards(tensors: Sequence[StoredPart], largest: int | None = None) -> list[PlannedFile]:
    """The files in order of `tensors`. `largest`: bytes of a file, `SHARD_BYTES` unless given."""
    shards: list[list[StoredPart]] = [[]]
    room = limit = largest or SHARD_BYTES
    for tensor in tensors:
        if tensor.nbytes > room and shards[-1]:
            shards.append([])
            room = limit
        shards[-1].append(tensor)
        room -= tensor.nbytes
    count = len(shards)
    names = [SINGLE] if count == 1 else [f"model-{n + 1:05}-of-{count:05}.safetensors" for n in range(count)]
    return [_planned(name, shard) for name, shard in zip(names, shards, strict=True)]


def index_of(files: Sequence[PlannedFile]) -> tuple[str, str] | None:
    """Name and text of the index; a single file needs none."""
    if len(files) == 1:
        return None
    total = sum(place.nbytes for file in files for place in file.places)
    mapping = {place.name: file.name for file in files for place in file.places}
    return INDEX, json.dumps({"metadata": {"total_size": total}, "weight_map": mapping}, indent=1)


def _planned(name: str, tensors: Sequence[StoredPart]) -> PlannedFile:
    """The format: length of the header (8 bytes), the header as JSON, the tensors' bytes in its order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        end = at + tensor.nbytes
        header[tensor.name] = {"dtype": STORED[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    places, at = [], len(head)
    for tensor in tensors:
        places.append(Place(tensor.name, at, tensor.nbytes))
        at += tensor.nbytes
    return PlannedFile(name, head, tuple(places))
