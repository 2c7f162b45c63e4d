"""Linear layers and the embedding over weights in any scheme."""

from __future__ import annotations

from torch import Tensor

from bankfull.layers.build import Build
from bankfull.ops import (
    Operation,
    best_output,
    best_output_bf16,
    best_output_int8,
    embedding,
    linear,
    linear_bf16,
    linear_int8,
)  # fmt: skip
from bankfull.ops.reference.linear import GROUP
from bankfull.ops.registry import BF16, INT8
from bankfull.weights.qtensor import QTensor


class Linear:
    def __init__(self, build: Build, inner: int, outer: int, bias: bool = False, weight: QTensor | None = None) -> None:
        stored = build.weight("weight", (outer, inner)) if weight is None else weight
        product, best = _operations(build.kit.activations, stored)
        self.weight = build.prepare(product, stored)
        self.bias = build.tensor("bias", (outer,)) if bias else None
        self._linear = build.bind(product, weight=stored)
        self._best = build.bind(best, weight=stored)

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x, self.weight, self.bias)

    def best(self, x: Tensor) -> Tensor:
        """Which output is highest, for each row; -1 where that cannot be said."""
        return self._best(x, self.weight, self.bias)


def _operations(activations: str, weight: QTensor) -> tuple[Operation, Operation]:
    """The product, and which of its outputs is highest."""
    if activations == BF16:
        return linear_bf16, best_output_bf16
    return (linear_int8, best_output_int8) if activations == INT8 and _rounds(weight) else (linear, best_output)


def _rounds(weight: QTensor) -> bool:
    """Does it make sense to round what this weight is multiplied with? Only if the weight itself is rounded."""
    return not weight.is_dense and weight.shape[1] % GROUP == 0


def split_linear(build: Build, inner: int, outers: list[int], bias: bool = False) -> list[Linear]:
    """Several layers whose rows one file tensor stacks (Phi's qkv and gate_up): views, nothing is copied."""
    whole = build.weight("weight", (sum(outers), inner))
    biases = build.tensor("bias", (sum(outers),)) if bias else None
    parts, first = [], 0
    for outer in outers:
        own = slice(first, first + outer)
        part = Linear(build, inner, outer, weight=whole.rows(own))
        part.bias = None if biases is None else biases[own]
        parts.append(part)
        first += outer
    return parts


class Embedding:
    def __init__(self, build: Build, count: int, size: int, scale: float = 1.0) -> None:
        self.table = build.weight("weight", (count, size))
        self.scale = scale
        self._dtype = build.dtype
        self._embedding = build.bind(embedding, weight=self.table)

    def __call__(self, ids: Tensor) -> Tensor:
        return self._embedding(ids, self.table, self._dtype, self.scale)
