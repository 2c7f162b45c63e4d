"""The part of a GGUF file before the tensors' data: key/values, then name, shape, type and place of each tensor."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from bankfull.weights.formats import READ_ONLY, SCHEMES
from bankfull.weights.gguf.file import DEFAULT_ALIGNMENT, READ_TYPES
from bankfull.weights.writing.output import Place, PlannedFile

VERSION = 3
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 4, 5, 6, 7, 8, 9, 10
TYPE_NUMBERS = {name: number for number, name in READ_TYPES.items()}

Field = bool | int | float | str | Sequence[str] | Sequence[int] | Sequence[float]
"""Whole numbers are written as unsigned, those of arrays as signed, floats as float32."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    name: str
    """Name in the file."""
    shape: tuple[int, ...]
    """Slowest dimension first."""
    kind: str
    parts: tuple[str, ...]
    """Names of the tensors that are stacked; one, except for experts."""

    @property
    def row_bytes(self) -> int:
        return (SCHEMES | READ_ONLY)[self.kind].row_bytes(self.shape[-1])

    @property
    def nbytes(self) -> int:
        return prod(self.shape[:-1]) * self.row_bytes


def planned_gguf(file: str, fields: Mapping[str, Field], tensors: Sequence[StoredTensor]) -> PlannedFile:
    """The layout of a file. Places have the names of the file's tensors."""
    head = bytearray(b"GGUF" + struct.pack("<IQQ", VERSION, len(tensors), len(fields)))
    for key, value in fields.items():
        head += _text(key) + _value(value)
    at, offsets = 0, []
    for tensor in tensors:
        offsets.append(at)
        shape = tensor.shape[::-1]
        head += _text(tensor.name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
        head += struct.pack("<IQ", TYPE_NUMBERS[tensor.kind], at)
        at += _padded(tensor.nbytes)
    head += bytes(_padded(len(head)) - len(head))
    places = [Place(t.name, len(head) + offset, t.nbytes) for t, offset in zip(tensors, offsets, strict=True)]
    return PlannedFile(file, bytes(head), tuple(places))


def _padded(size: int) -> int:
    return -(-size // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


def _value(value: Field) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", UINT32, value) if value < 1 << 32 else struct.pack("<IQ", UINT64, value)
    if isinstance(value, float):
        return struct.pack("<If", FLOAT32, value)
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _text(value)
    if all(isinstance(item, str) for item in value):
        texts = b"".join(_text(str(item)) for item in value)
        return struct.pack("<IIQ", ARRAY, STRING, len(value)) + texts
    kind, code = (FLOAT32, "f") if any(isinstance(item, float) for item in value) else (INT32, "i")
    return struct.pack("<IIQ", ARRAY, kind, len(value)) + struct.pack(f"<{len(value)}{code}", *value)
