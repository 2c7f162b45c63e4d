"""Linear layers and the embedding over weights in any scheme."""

from __future__ import annotations

from torch import Tensor

from bankfull.layers.build import Build
from bankfull.ops import embedding, linear
from bankfull.weights.qtensor import QTensor


class Linear:
    def __init__(self, build: Build, inner: int, outer: int, bias: bool = False, weight: QTensor | None = None) -> None:
        self.weight = build.weight("weight", (outer, inner)) if weight is None else weight
        self.bias = build.tensor("bias", (outer,)) if bias else None
        self._linear = build.bind(linear, weight=self.weight)

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x, self.weight, self.bias)  # type: ignore[no-any-return]


def split_linear(build: Build, inner: int, outers: list[int]) -> list[Linear]:
    """Several layers whose rows one file tensor stacks (Phi's qkv and gate_up): views, nothing is copied."""
    whole = build.weight("weight", (sum(outers), inner))
    parts, first = [], 0
    for outer in outers:
        parts.append(Linear(build, inner, outer, weight=whole.rows(slice(first, first + outer))))
        first += outer
    return parts


class Embedding:
    def __init__(self, build: Build, count: int, size: int) -> None:
        self.table = build.weight("weight", (count, size))
        self._dtype = build.dtype
        self._embedding = build.bind(embedding, weight=self.table)

    def __call__(self, ids: Tensor) -> Tensor:
        return self._embedding(ids, self.table, self._dtype)  # type: ignore[no-any-return]
