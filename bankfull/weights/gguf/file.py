"""The GGUF container: little-endian files of version 2 or 3, whole or split, memory-mapped and read on demand.

Layout: magic, version, counts; key/values; tensor descriptions; padding; tensor data. Opening validates the whole
header; tensor data are views on a copy-on-write mapping, so opening reads no weights.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from bankfull.errors import ModelError
from bankfull.weights.formats import READ_ONLY, SCHEMES
from bankfull.weights.formats.dense import DTYPES
from bankfull.weights.gguf.header import open_header
from bankfull.weights.gguf.values import Cursor, Metadata
from bankfull.weights.qtensor import QTensor
from bankfull.weights.scheme import Scheme

MAX_TENSORS = 1 << 16
MAX_TENSOR_NAME_BYTES = 255
MAX_DIMENSIONS = 4
MAX_PARTS = 1024
DEFAULT_ALIGNMENT = 32
SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)

READ_TYPES: dict[int, str] = {
    0: "f32",
    1: "f16",
    30: "bf16",
    2: "q4_0",
    3: "q4_1",
    6: "q5_0",
    7: "q5_1",
    8: "q8_0",
    10: "q2_k",
    11: "q3_k",
    12: "q4_k",
    13: "q5_k",
    14: "q6_k",
    16: "iq2_xxs",
    17: "iq2_xs",
    18: "iq3_xxs",
    19: "iq1_s",
    20: "iq4_nl",
    21: "iq3_s",
    22: "iq2_s",
    23: "iq4_xs",
    29: "iq1_m",
    39: "mxfp4",
}
REFUSED_TYPES: dict[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    9: "Q8_1",
    15: "Q8_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    34: "TQ1_0",
    35: "TQ2_0",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
    40: "NVFP4",
    41: "Q1_0",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    scheme: Scheme
    shape: tuple[int, ...]  # slowest dimension first, as torch writes it
    data: mmap.mmap
    offset: int  # from the start of the file
    nbytes: int

    def load(self) -> QTensor:
        """A view on the mapped file: bytes are read from disk on first use."""
        if self.scheme.is_dense:
            dtype = DTYPES[self.scheme.name]
            flat = torch.frombuffer(self.data, dtype=dtype, count=prod(self.shape), offset=self.offset)
            return QTensor(self.scheme, {"data": flat.reshape(self.shape)}, self.shape)
        flat = torch.frombuffer(self.data, dtype=torch.uint8, count=self.nbytes, offset=self.offset)
        blocks = flat.reshape(*self.shape[:-1], self.scheme.row_bytes(self.shape[-1]))
        return QTensor(self.scheme, {"blocks": blocks}, self.shape)


@dataclass(frozen=True, slots=True)
class Container:
    """One model: the metadata of its first part, and the tensors of all parts under their GGUF names."""

    path: Path
    metadata: Metadata
    tensors: Mapping[str, TensorInfo]


def open_container(path: Path) -> Container:
    metadata, tensors = _open_part(path)
    parts = _whole(metadata, "split.count", 1, path)
    if parts <= 1:
        return Container(path, metadata, tensors)
    match = SPLIT_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != parts or parts > MAX_PARTS:
        raise ModelError(f"{path.name} is one of {parts} parts, so its name must end in -00001-of-{parts:05d}.gguf")
    if int(match["part"]) != 1 or _whole(metadata, "split.no", 0, path) != 0:
        raise ModelError(f"{path.name} is not the first of {parts} parts: open the -00001-of-{parts:05d} file")
    for number in range(2, parts + 1):
        part = path.with_name(f"{match['stem']}-{number:05d}-of-{parts:05d}.gguf")
        extra, more = _open_part(part)
        if _whole(extra, "split.no", -1, part) != number - 1 or _whole(extra, "split.count", -1, part) != parts:
            raise ModelError(f"{part.name} is not marked as part {number} of {parts}: it belongs to another model")
        if twice := tensors.keys() & more.keys():
            raise ModelError(f"{part.name} repeats the tensor '{min(twice)}' of an earlier part: they do not match")
        tensors.update(more)
    if (total := _whole(metadata, "split.tensors.count", len(tensors), path)) != len(tensors):
        raise ModelError(f"{path.name} declares {total} tensors but its {parts} parts hold {len(tensors)}")
    return Container(path, metadata, tensors)


def _open_part(path: Path) -> tuple[Metadata, dict[str, TensorInfo]]:
    header = open_header(path)
    return header.metadata, _find_tensors(header.cursor, header.tensors, _alignment(header.metadata, path))


def _alignment(metadata: Metadata, path: Path) -> int:
    alignment = _whole(metadata, "general.alignment", DEFAULT_ALIGNMENT, path)
    # Below 8, a float64 or a vector load would be misaligned; above 1 MiB, the padding is an attack.
    if not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise ModelError(f"{path.name} declares alignment {alignment}, which is not a power of two from 8 to 1048576")
    return alignment


def _whole(metadata: Metadata, key: str, default: int, path: Path) -> int:
    value = metadata.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ModelError(f"{path.name} has a '{key}' that is not a whole number: the file is damaged")
    return value


def _find_tensors(cursor: Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    if count > MAX_TENSORS:
        raise ModelError(f"{cursor.name} claims {count} tensors, over the limit of {MAX_TENSORS}: the file is damaged")
    described: dict[str, tuple[Scheme, tuple[int, ...], int]] = {}
    for _ in range(count):
        name = cursor.ascii(MAX_TENSOR_NAME_BYTES, "a tensor name")
        if name in described:
            raise ModelError(f"{cursor.name} has the tensor '{name}' twice: the file is damaged")
        described[name] = _describe(cursor, name)
    base = -(-cursor.at // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, (scheme, shape, offset) in described.items():
        nbytes = prod(shape[:-1]) * scheme.row_bytes(shape[-1])
        if offset % alignment:
            raise ModelError(f"{cursor.name} puts '{name}' at {offset}, not a multiple of {alignment}: it is damaged")
        if base + offset + nbytes > len(cursor.data):
            raise ModelError(f"{cursor.name} ends before the data of '{name}': the file is not fully downloaded")
        tensors[name] = TensorInfo(scheme, shape, cursor.data, base + offset, nbytes)
    _refuse_overlaps(cursor.name, tensors)
    return tensors


def _describe(cursor: Cursor, name: str) -> tuple[Scheme, tuple[int, ...], int]:
    what = f"the description of '{name}'"
    dimensions = cursor.u32(what)
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise ModelError(f"{cursor.name} gives '{name}' {dimensions} dimensions instead of 1 to 4: the file is damaged")
    shape = tuple(cursor.u64(what) for _ in range(dimensions))[::-1]
    kind, offset = cursor.u32(what), cursor.u64(what)
    if kind not in READ_TYPES:
        known = ", ".join(scheme.upper() for scheme in READ_TYPES.values())
        label = REFUSED_TYPES.get(kind, f"number {kind}")
        raise ModelError(f"{cursor.name} stores '{name}' as type {label}, which is not read: use a file with {known}")
    scheme = (SCHEMES | READ_ONLY)[READ_TYPES[kind]]
    if 0 in shape or shape[-1] % scheme.block:
        raise ModelError(f"{cursor.name} gives '{name}' the shape {shape}, impossible for {scheme.name}: it is damaged")
    return scheme, shape, offset


def _refuse_overlaps(name: str, tensors: Mapping[str, TensorInfo]) -> None:
    end, previous = 0, ""
    for tensor, info in sorted(tensors.items(), key=lambda item: item[1].offset):
        if info.offset < end:
            raise ModelError(f"{name} stores '{tensor}' over the data of '{previous}': the file is damaged")
        end, previous = info.offset + info.nbytes, tensor
