"""A model's tensors with its matrices requantized to another weight type."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from bankfull.errors import ConfigError, ModelError
from bankfull.weights.formats import SCHEMES
from bankfull.weights.formats.groups import GROUPS, KINDS, LOW_BITS, WITH_ZEROS, name_of
from bankfull.weights.formats.rows import FP8, INT8_ROW
from bankfull.weights.qtensor import QTensor, Scheme
from bankfull.weights.quantize import TYPES, quantize
from bankfull.weights.source import TensorSource
from bankfull.weights.source_view import SourceView

KEEP, TABLES = "keep", "tables"
_GROUPED = (*KINDS, *LOW_BITS, *WITH_ZEROS)
_INTEGERS = re.compile(rf"({'|'.join(_GROUPED)})(?:(?::|_g)([0-9]+))?")
_BY_ROW = {"int8:row": INT8_ROW, INT8_ROW: INT8_ROW, FP8: FP8}
_BLOCKS = tuple(name for name in TYPES if SCHEMES[name].about and name not in _BY_ROW and not _INTEGERS.fullmatch(name))
_CHOICES = (
    "int8, int4, int3, int2, int4:64 (a scale for each 64 columns; or 32, or 128), uint4, uint3, uint2 (with a zero "
    f"point), int8:row (a scale for each row), fp8 or one of {', '.join(_BLOCKS)}"
)
_ROUTER = re.compile(
    r"\.(mlp|block_sparse_moe|feed_forward|feed)\.(gate|router|router\.layer|shared_expert_gate)\.weight$"
)
"""Matrices that choose experts: tiny, and a rounded one chooses other experts."""
_TABLE = re.compile(r"(^|\.)(lm_head|embeddings|embed_\w+|wte|wpe)\.weight$")


@dataclass(frozen=True, slots=True)
class Requantized(SourceView):
    """`source` with every matrix stored in the first of `types` whose blocks divide its columns; "keep" always fits and
    leaves a matrix as it is.

    Matrices are the two-dimensional tensors whose names end in ".weight", and stacked matrices of experts. Routers of
    experts are always kept. Embeddings and the head are kept unless `tables` is set: they are often stored with more
    precision, and small models lose most from quantizing them.
    """

    types: tuple[str, ...]
    tables: bool = False
    device: torch.device | None = None
    """Device on which matrices are quantized and stay; None: the source's device."""
    by_name: Mapping[str, str] = field(default_factory=dict)
    """Types of single matrices, before `types`."""

    def scheme(self, name: str) -> Scheme:
        return self._target(name) or self.source.scheme(name)

    def get(self, name: str) -> QTensor:
        tensor, target = self.source.get(name), self._target(name)
        if target is None:
            return tensor
        return quantize((tensor if self.device is None else tensor.to(self.device)).dequantize(), target.name)

    def kept(self) -> list[str]:
        """Matrices kept as they are because none of `types` fits."""
        return [name for name in self.source.names() if self._meant(name) and self._target(name) is None]

    def _meant(self, name: str) -> bool:
        return is_inner_matrix(self.source, name, self.tables)

    def _target(self, name: str) -> Scheme | None:
        if not self._meant(name):
            return None
        columns = self.source.shape(name)[-1]
        for chosen in (self.by_name[name],) if name in self.by_name else self.types:
            if chosen == KEEP:
                return None
            if columns % SCHEMES[chosen].block == 0:
                return SCHEMES[chosen]
        raise ModelError(
            f"{name} has {columns} columns, which the blocks of {', '.join(self.types)} do not divide; add a type "
            f"for such matrices after a comma, or keep them as they are: {self.types[0]},keep."
        )


@dataclass(frozen=True, slots=True)
class QuantizationSpec:
    """The weight types a user selected for a model's matrices."""

    types: tuple[str, ...]
    tables: bool


def parse_quantization(text: str, device: str = "cpu") -> QuantizationSpec:
    """ "int4", "int8:128", "q4_k,q5_0", "q4_k,keep", "q4_0,tables": types in order of preference, the fallback for
    matrices that none of them fits, and whether embeddings and the head are included.

    The integer types fall back to narrower groups by themselves, and then keep a matrix as it is. Without an explicit
    group size they use the fastest on `device`: 32 columns on a CPU; on a GPU the whole row for int8, 128 for others.
    """
    words = [part.strip().lower() for part in text.split(",")]
    types: list[str] = []
    for word in words:
        if word != TABLES:
            types += _types_of(word, device)
    if not types or types[0] == KEEP:
        raise ConfigError(f"Weights cannot be quantized to {text[:40]!r}, which names no type; use {_CHOICES}.")
    if all(name not in _BLOCKS for name in types):
        types.append(KEEP)
    return QuantizationSpec(tuple(types), TABLES in words)


def _types_of(word: str, device: str) -> list[str]:
    if word == KEEP or word in _BLOCKS:
        return [word]
    if word in _BY_ROW or (word == "int8" and device != "cpu"):
        return [_BY_ROW.get(word, INT8_ROW)]
    match = _INTEGERS.fullmatch(word)
    if match is None:
        raise ConfigError(f"Weights cannot be quantized to {word[:40]!r}; use {_CHOICES}.")
    kind, widest = match[1], int(match[2] or (min(GROUPS) if device == "cpu" else max(GROUPS)))
    if widest not in GROUPS:
        raise ConfigError(f"A group cannot be {match[2][:40]} columns wide; use {kind}:32, {kind}:64 or {kind}:128.")
    return [name_of(kind, group) for group in GROUPS if group <= widest]


def is_table(name: str) -> bool:
    """Whether the tensor is an embedding or the head."""
    return _TABLE.search(name) is not None


def is_matrix(source: TensorSource, name: str) -> bool:
    dimensions = 3 if STACKED.search(name) else 2
    return name.endswith(".weight") and len(source.shape(name)) == dimensions


def is_inner_matrix(source: TensorSource, name: str, tables: bool = False) -> bool:
    """Whether a tensor is a matrix that may be quantized: no router, and no embedding or head unless `tables`."""
    return is_matrix(source, name) and not _ROUTER.search(name) and (tables or not _TABLE.search(name))


STACKED = re.compile(r"\.experts\.[a-z]\w*\.weight$|\.block_sparse_moe\.(input|output)_linear\.weight$")
"""Names of stacked matrices of experts; matrices of single experts have the expert's number in their name."""


EXPERT = re.compile(r"\.experts\.\d+\.")
"""Part of the names of single experts' matrices."""


def bits_per_weight(source: TensorSource) -> float:
    """Average over all matrices, including scales and minima."""
    bits = elements = 0
    for name in source.names():
        if is_matrix(source, name):
            shape = source.shape(name)
            bits += 8 * math.prod(shape[:-1]) * source.scheme(name).row_bytes(shape[-1])
            elements += math.prod(shape)
    return bits / max(elements, 1)


def block_types(source: TensorSource) -> list[str]:
    """Quantized types of a source's matrices."""
    schemes = {source.scheme(name) for name in source.names() if is_matrix(source, name)}
    return sorted(scheme.name for scheme in schemes if scheme.is_rounded)


def inner_weights(source: TensorSource) -> int:
    """Number of weights in quantized matrices other than embeddings and the head."""
    return sum(
        math.prod(source.shape(name))
        for name in source.names()
        if is_matrix(source, name) and not is_table(name) and source.scheme(name).is_rounded
    )
