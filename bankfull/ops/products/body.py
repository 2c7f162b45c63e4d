"""Embedding and linear layers over quantized or dense weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bankfull.ops.cost import Cost, nbytes, rounded_to
from bankfull.ops.norm.body import rms_norm, wide
from bankfull.ops.pointwise.body import activate_mul
from bankfull.ops.registry import Operation, op
from bankfull.weights.qtensor import QTensor


def product_flops(rows: int, weight: QTensor) -> float:
    """Zeros that are not stored are not multiplied."""
    out, inner = weight.shape
    return 2.0 * rows * out * inner * weight.scheme.density


def linear_cost(x: Tensor, weight: QTensor, bias: Tensor | None = None) -> Cost:
    rows = x.numel() // x.shape[-1]
    out = weight.shape[0]
    return Cost(product_flops(rows, weight), nbytes(x, weight, bias), rows * out * x.element_size())


def linear_shape(x: Tensor, weight: QTensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@op(cost=linear_cost, shape=linear_shape)
def linear(x: Tensor, weight: QTensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, weight-only quantization: activations keep their dtype."""
    return torch.nn.functional.linear(x, weight.dequantize(x.dtype), bias)


def best_cost(x: Tensor, weight: QTensor, bias: Tensor | None = None) -> Cost:
    rows = x.numel() // x.shape[-1]
    return Cost(product_flops(rows, weight), nbytes(x, weight, bias), rows * 8)


def best_shape(x: Tensor, weight: QTensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty(*x.shape[:-1], dtype=torch.int64)


def highest(scores: Tensor) -> Tensor:
    """Argmax of each row, the first among equals; -1 if the maximum is not finite or any score is NaN."""
    top, index = scores.max(-1)
    return torch.where(top.isfinite(), index, -1)


def best_of(product: Operation, cost: Callable[..., Cost] = best_cost) -> Operation:
    """The operation for the argmax over the outputs of a product: greedy decoding needs no logits, so a kernel stores
    none."""

    def best(x: Tensor, weight: QTensor, bias: Tensor | None = None) -> Tensor:
        return highest(product.body(x, weight, bias))

    best.__name__ = product.name.replace("linear", "best_output")
    return op(cost=cost, shape=best_shape)(best)


best_output = best_of(linear)

GROUP = 32
"""Activations per quantization group."""


def quantized_groups(x: Tensor) -> Tensor:
    """x quantized to int8 with one scale per group of columns (absolute maximum -> 127) and dequantized."""
    groups = wide(x).unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest > 0, 127 / largest, 0)
    return ((groups * inverse).round() * (largest / 127)).flatten(-2).to(x.dtype)


@op(cost=rounded_to("int8", linear_cost), shape=linear_shape)
def linear_int8(x: Tensor, weight: QTensor, bias: Tensor | None = None) -> Tensor:
    """Lossy: activations are quantized to int8 in groups of 32 columns before the GEMM. A kernel may keep them in
    bfloat16 where that is no slower for many rows."""
    return torch.nn.functional.linear(quantized_groups(x), weight.dequantize(x.dtype), bias)


HADAMARD_BLOCK = 64
"""Columns per block of the Hadamard transform."""


def hadamard(x: Tensor) -> Tensor:
    """Orthonormal Hadamard transform of each block of 64 columns. It preserves dot products of transformed vectors and
    spreads an outlier column over its block."""
    blocks = wide(x).unflatten(-1, (-1, HADAMARD_BLOCK))
    for bit in range(HADAMARD_BLOCK.bit_length() - 1):
        pairs = blocks.unflatten(-1, (-1, 2, 1 << bit))
        first, second = pairs.unbind(-2)
        blocks = torch.stack((first + second, first - second), -2).flatten(-3)
    return blocks.flatten(-2) / HADAMARD_BLOCK**0.5


def quantized_rows(x: Tensor) -> Tensor:
    """x quantized to int8 with one scale per row (absolute maximum -> 127) and dequantized."""
    largest = x.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest > 0, x.new_full((), 127) / largest, 0)  # a Python 127 / largest would round twice
    return (x * inverse).round() * (largest / 127)


@op(cost=rounded_to("int8", linear_cost), shape=linear_shape)
def linear_hadamard(x: Tensor, weight: QTensor, bias: Tensor | None = None) -> Tensor:
    """Lossy, for many rows: activations and weights are Hadamard-transformed, then quantized to int8 with one scale per
    row and per output. A kernel may round activations to bfloat16 first, and compute few rows as `linear_int8`."""
    rows, weights = quantized_rows(hadamard(x)), quantized_rows(hadamard(weight.dequantize(x.dtype)))
    return torch.nn.functional.linear(rows, weights, None if bias is None else wide(bias)).to(x.dtype)


best_output_int8 = best_of(linear_int8, rounded_to("int8", best_cost))
best_output_hadamard = best_of(linear_hadamard, rounded_to("int8", best_cost))


@op(cost=rounded_to("bf16", linear_cost), shape=linear_shape)
def linear_bf16(x: Tensor, weight: QTensor, bias: Tensor | None = None) -> Tensor:
    """Activations are rounded to bfloat16 before the GEMM; the accumulator has the dtype of x. A kernel may also round
    block-quantized weights to bfloat16."""
    return torch.nn.functional.linear(x.to(torch.bfloat16).to(x.dtype), weight.dequantize(x.dtype), bias)


best_output_bf16 = best_of(linear_bf16, rounded_to("bf16", best_cost))


def gated_cost(x: Tensor, weight: QTensor, bias: Tensor | None, kind: str) -> Cost:
    rows = x.numel() // x.shape[-1]
    out = weight.shape[0]
    flops = product_flops(rows, weight) + 4.5 * rows * out
    return Cost(flops, nbytes(x, weight, bias), rows * out // 2 * x.element_size())


def gated_shape(x: Tensor, weight: QTensor, bias: Tensor | None, kind: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0] // 2)


def gated_of(product: Operation, cost: Callable[..., Cost] = gated_cost) -> Operation:
    """The operation for f(gate) * up, where the first half of the weight's rows computes the gate and the second half
    `up`. Layers use it where a provider has it as one fused kernel."""

    def gated(x: Tensor, weight: QTensor, bias: Tensor | None, kind: str) -> Tensor:
        gate, up = product.body(x, weight, bias).chunk(2, -1)
        return activate_mul.body(gate, up, kind)

    gated.__name__ = f"gated_{product.name}"
    return op(cost=cost, shape=gated_shape)(gated)


gated_linear = gated_of(linear)
FEW_ROWS = 4


def normed_rows(weight: QTensor) -> int:
    """Largest row count for which layers fuse the norm into the linear: each program of the kernel repeats the norm."""
    return FEW_ROWS if weight.is_dense else 1


@dataclass(frozen=True, slots=True)
class Unnormed:
    """The input of a linear before residual add and norm. Its reader does both and stores the new residual stream in
    `joined`. There must be exactly one reader."""

    x: Tensor
    delta: Tensor
    weight: Tensor
    eps: float
    offset: float
    joined: Tensor

    def read(self) -> Tensor:
        """Reference: residual add, then norm."""
        self.joined.copy_(self.x + self.delta)
        return rms_norm.body(self.joined, self.weight, self.eps, self.offset)

    @property
    def cost(self) -> Cost:
        return Cost(5.0 * self.x.numel(), nbytes(self.delta, self.weight), nbytes(self.x))


def normed_of(product: Operation) -> Operation:
    """The operation for a product with a fused input norm. Layers use it where a provider has it."""
    assert product.shape is not None
    shape = product.shape

    def normed(x: Unnormed, weight: QTensor, *rest: Any) -> Tensor:
        result: Tensor = product.body(x.read(), weight, *rest)
        return result

    normed.__name__ = f"normed_{product.name}"
    return op(
        cost=lambda x, *others: product.cost(x.x, *others) + x.cost,
        shape=lambda x, *others: shape(x.x, *others),
    )(normed)


normed_linear, normed_best_output, normed_gated_linear = map(normed_of, (linear, best_output, gated_linear))


def _embedding_cost(ids: Tensor, table: QTensor, dtype: torch.dtype, scale: float = 1.0) -> Cost:
    row_bytes = nbytes(table) / table.shape[0]
    scaled = 0.0 if scale == 1.0 else float(ids.numel() * table.shape[1])
    return Cost(scaled, ids.numel() * row_bytes + nbytes(ids), ids.numel() * table.shape[1] * dtype.itemsize)


def _embedding_shape(ids: Tensor, table: QTensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return torch.empty(ids.shape[0], table.shape[1], dtype=dtype, device="meta")


@op(cost=_embedding_cost, shape=_embedding_shape)
def embedding(ids: Tensor, table: QTensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Read and dequantize only the rows of `ids`."""
    rows = table.rows(ids).dequantize(dtype)
    return rows if scale == 1.0 else rows * scale
