"""A model's tensors with their matrices in another weight type."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from bankfull.errors import ConfigError, ModelError
from bankfull.weights.formats import SCHEMES
from bankfull.weights.qtensor import QTensor, Scheme
from bankfull.weights.quantize import ENCODINGS, quantize
from bankfull.weights.source import TensorSource

KEEP = "keep"
_TABLE = re.compile(r"(^|\.)(lm_head|embeddings|embed_\w+)\.weight$")


@dataclass(frozen=True, slots=True)
class Requantized:
    """`source` with every matrix stored in the first of `types` whose blocks fit its columns; "keep" fits all, and
    leaves a matrix as it is.

    Matrices are the two-dimensional tensors that end in ".weight". Embeddings and the head stay as they are unless
    `tables` is set: they are often kept finer than the rest, and small models lose most by them.
    """

    source: TensorSource
    types: tuple[str, ...]
    tables: bool = False

    def names(self) -> list[str]:
        return self.source.names()

    def has(self, name: str) -> bool:
        return self.source.has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(name)

    def scheme(self, name: str) -> Scheme:
        return self._target(name) or self.source.scheme(name)

    def get(self, name: str) -> QTensor:
        found, target = self.source.get(name), self._target(name)
        return found if target is None else quantize(found.dequantize(), target.name)

    def unread(self) -> list[str]:
        return self.source.unread()

    def _target(self, name: str) -> Scheme | None:
        if not is_matrix(self.source, name) or (_TABLE.search(name) and not self.tables):
            return None
        columns = self.source.shape(name)[1]
        for chosen in self.types:
            if chosen == KEEP:
                return None
            if columns % SCHEMES[chosen].block == 0:
                return SCHEMES[chosen]
        raise ModelError(
            f"{name} has {columns} columns, which the blocks of {', '.join(self.types)} do not divide; name a type "
            f"for such matrices behind a comma, or leave them as they are: {self.types[0]},keep."
        )


def parse_types(text: str) -> tuple[str, ...]:
    """ "q4_k,q5_0" or "q4_k,keep": the first type, and what becomes of matrices that it does not fit."""
    types = tuple(part.strip().lower() for part in text.split(","))
    unknown = [name for name in types if name not in ENCODINGS and (name != KEEP or len(types) == 1)]
    if unknown:
        raise ConfigError(f"Weights cannot be quantized to {unknown[0][:40]!r}; use one of {', '.join(ENCODINGS)}.")
    return types


def is_matrix(source: TensorSource, name: str) -> bool:
    return name.endswith(".weight") and len(source.shape(name)) == 2


def bits_per_weight(source: TensorSource) -> float:
    """Over all matrices, scales and minima included."""
    bits = elements = 0
    for name in source.names():
        if is_matrix(source, name):
            shape = source.shape(name)
            bits += 8 * shape[0] * source.scheme(name).row_bytes(shape[1])
            elements += math.prod(shape)
    return bits / max(elements, 1)
