"""Embedding and linear layers over quantized or dense weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bankfull.ops.cost import Cost, nbytes
from bankfull.ops.reference.activation import activate_mul
from bankfull.ops.reference.norm import rms_norm, wide
from bankfull.ops.registry import op
from bankfull.weights.qtensor import QTensor


def _linear_cost(x: Tensor, weight: QTensor, bias: Tensor | None = None) -> Cost:
    rows = x.numel() // x.shape[-1]
    out, inner = weight.shape
    return Cost(2.0 * rows * out * inner, nbytes(x, weight, bias), rows * out * x.element_size())


def _linear_shape(x: Tensor, weight: QTensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@op(cost=_linear_cost, shape=_linear_shape)
def linear(x: Tensor, weight: QTensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, with activations untouched (weight-only arithmetic)."""
    return torch.nn.functional.linear(x, weight.dequantize(x.dtype), bias)


def _best_cost(x: Tensor, weight: QTensor, bias: Tensor | None = None) -> Cost:
    rows = x.numel() // x.shape[-1]
    out, inner = weight.shape
    return Cost(2.0 * rows * out * inner, nbytes(x, weight, bias), rows * 8)


def _best_shape(x: Tensor, weight: QTensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty(*x.shape[:-1], dtype=torch.int64)


def highest(scores: Tensor) -> Tensor:
    """The index of each line's highest score, the lowest among equals; -1 where it is not finite or one is NaN."""
    top, index = scores.max(-1)
    return torch.where(top.isfinite(), index, -1)


@op(cost=_best_cost, shape=_best_shape)
def best_output(x: Tensor, weight: QTensor, bias: Tensor | None = None) -> Tensor:
    """Which output of `linear` is highest: greedy decoding needs no more of a head, and a kernel stores no more."""
    return highest(linear.body(x, weight, bias))


GROUP = 32
"""Activations that share a scale."""


def rounded(x: Tensor) -> Tensor:
    """x as int8 codes times a scale for each group of columns: the largest of a group is 127."""
    groups = wide(x).unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest > 0, 127 / largest, 0)
    return ((groups * inverse).round() * (largest / 127)).flatten(-2).to(x.dtype)


@op(cost=_linear_cost, shape=_linear_shape)
def linear_int8(x: Tensor, weight: QTensor, bias: Tensor | None = None) -> Tensor:
    """The lossy one: activations are rounded to 8 bits, in groups of 32 columns, before they are multiplied. A kernel
    may keep them finer (bfloat16) where many rows make that no slower."""
    return torch.nn.functional.linear(rounded(x), weight.dequantize(x.dtype), bias)


MIXED = 64
"""Columns that are mixed with each other."""


def mixed(x: Tensor) -> Tensor:
    """Each 64 columns are replaced by their sums with the signs of a Hadamard matrix: products of two that are mixed
    stay what they were, and what was in one large column is in all of them."""
    blocks = wide(x).unflatten(-1, (-1, MIXED))
    for bit in range(MIXED.bit_length() - 1):
        pairs = blocks.unflatten(-1, (-1, 2, 1 << bit))
        first, second = pairs.unbind(-2)
        blocks = torch.stack((first + second, first - second), -2).flatten(-3)
    return blocks.flatten(-2) / MIXED**0.5


def rounded_rows(x: Tensor) -> Tensor:
    """x as int8 codes times a scale for each row: its largest is 127."""
    largest = x.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest > 0, x.new_tensor(127) / largest, 0)  # one rounding: 127 / largest would have two
    return (x * inverse).round() * (largest / 127)


@op(cost=_linear_cost, shape=_linear_shape)
def linear_mixed(x: Tensor, weight: QTensor, bias: Tensor | None = None) -> Tensor:
    """The lossy one for many rows: activations and weights are mixed, then rounded to 8 bits with one scale for each
    row and each output. A kernel may round activations to bfloat16 first, and take few rows as `linear_int8` does."""
    rows, weights = rounded_rows(mixed(x)), rounded_rows(mixed(weight.dequantize(x.dtype)))
    return torch.nn.functional.linear(rows, weights, None if bias is None else wide(bias)).to(x.dtype)


@op(cost=_best_cost, shape=_best_shape)
def best_output_int8(x: Tensor, weight: QTensor, bias: Tensor | None = None) -> Tensor:
    """Which output of `linear_int8` is highest."""
    return highest(linear_int8.body(x, weight, bias))


@op(cost=_best_cost, shape=_best_shape)
def best_output_mixed(x: Tensor, weight: QTensor, bias: Tensor | None = None) -> Tensor:
    """Which output of `linear_mixed` is highest."""
    return highest(linear_mixed.body(x, weight, bias))


@op(cost=_linear_cost, shape=_linear_shape)
def linear_bf16(x: Tensor, weight: QTensor, bias: Tensor | None = None) -> Tensor:
    """Activations are rounded to bfloat16 before they are multiplied; products are summed as wide as x is. A kernel may
    round weights that lie in blocks to bfloat16, too."""
    return torch.nn.functional.linear(x.to(torch.bfloat16).to(x.dtype), weight.dequantize(x.dtype), bias)


@op(cost=_best_cost, shape=_best_shape)
def best_output_bf16(x: Tensor, weight: QTensor, bias: Tensor | None = None) -> Tensor:
    """Which output of `linear_bf16` is highest."""
    return highest(linear_bf16.body(x, weight, bias))


def _gated_cost(x: Tensor, weight: QTensor, bias: Tensor | None, kind: str) -> Cost:
    rows = x.numel() // x.shape[-1]
    out, inner = weight.shape
    return Cost(rows * out * (2.0 * inner + 4.5), nbytes(x, weight, bias), rows * out // 2 * x.element_size())


def _gated_shape(x: Tensor, weight: QTensor, bias: Tensor | None, kind: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0] // 2)


@op(cost=_gated_cost, shape=_gated_shape)
def gated_linear(x: Tensor, weight: QTensor, bias: Tensor | None, kind: str) -> Tensor:
    """f(gate) * up, where the first half of the weight's rows gives the gate and the second half what passes it.
    Layers use it where a kernel offers it."""
    gate, up = linear.body(x, weight, bias).chunk(2, -1)
    return activate_mul.body(gate, up, kind)


FEW_ROWS = 4


def normed_rows(weight: QTensor) -> int:
    """Layers let a linear norm its own input up to so many rows: each program of a kernel does it again."""
    return FEW_ROWS if weight.is_dense else 1


@dataclass(frozen=True, slots=True)
class Unnormed:
    """An input whose branch has not joined the stream, and which is not normed yet: whoever reads it does both, and
    leaves the stream with the branch in `joined`. It has exactly one reader."""

    x: Tensor
    delta: Tensor
    weight: Tensor
    eps: float
    offset: float
    joined: Tensor

    def read(self) -> Tensor:
        """The meaning: join, then norm."""
        self.joined.copy_(self.x + self.delta)
        return rms_norm.body(self.joined, self.weight, self.eps, self.offset)

    @property
    def cost(self) -> Cost:
        return Cost(5.0 * self.x.numel(), nbytes(self.delta, self.weight), nbytes(self.x))


@op(
    cost=lambda x, weight, bias=None: _linear_cost(x.x, weight, bias) + x.cost,
    shape=lambda x, weight, bias=None: _linear_shape(x.x, weight, bias),
)
def normed_linear(x: Unnormed, weight: QTensor, bias: Tensor | None = None) -> Tensor:
    """`linear` that norms its own input. Layers use it where a kernel offers it."""
    return linear.body(x.read(), weight, bias)


@op(
    cost=lambda x, weight, bias=None: _best_cost(x.x, weight, bias) + x.cost,
    shape=lambda x, weight, bias=None: _best_shape(x.x, weight, bias),
)
def normed_best_output(x: Unnormed, weight: QTensor, bias: Tensor | None = None) -> Tensor:
    """`best_output` that norms its own input. A head uses it where a kernel offers it."""
    return best_output.body(x.read(), weight, bias)


@op(
    cost=lambda x, weight, bias, kind: _gated_cost(x.x, weight, bias, kind) + x.cost,
    shape=lambda x, weight, bias, kind: _gated_shape(x.x, weight, bias, kind),
)
def normed_gated_linear(x: Unnormed, weight: QTensor, bias: Tensor | None, kind: str) -> Tensor:
    """`gated_linear` that norms its own input."""
    return gated_linear.body(x.read(), weight, bias, kind)


def _embedding_cost(ids: Tensor, table: QTensor, dtype: torch.dtype, scale: float = 1.0) -> Cost:
    row_bytes = nbytes(table) / table.shape[0]
    scaled = 0.0 if scale == 1.0 else float(ids.numel() * table.shape[1])
    return Cost(scaled, ids.numel() * row_bytes + nbytes(ids), ids.numel() * table.shape[1] * dtype.itemsize)


def _embedding_shape(ids: Tensor, table: QTensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return torch.empty(ids.shape[0], table.shape[1], dtype=dtype, device="meta")


@op(cost=_embedding_cost, shape=_embedding_shape)
def embedding(ids: Tensor, table: QTensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Only the rows asked for are read and dequantized."""
    rows = table.rows(ids).dequantize(dtype)
    return rows if scale == 1.0 else rows * scale
