"""Embedding and linear layers over quantized or dense weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bankfull.ops.cost import Cost, Operands, nbytes
from bankfull.ops.norm.body import rms_norm, wide
from bankfull.ops.pointwise.body import activate_mul
from bankfull.ops.registry import Operation, op
from bankfull.weights.qtensor import QTensor


def product_flops(rows: int, weight: QTensor) -> float:
    """Zeros that are not stored are not multiplied."""
    out, inner = weight.shape
    return 2.0 * rows * out * inner * weight.scheme.density


class Epilogue(NamedTuple):
    """What follows the sums of a product, in this order. Layers ask for a gate or the argmax in the same pass where a
    provider has that as one kernel."""

    bias: Tensor | None = None
    gate: str = ""
    """The activation f of f(gate) * up, where the first half of the weight's rows computes the gate and the second half
    `up`; empty without these."""
    best: bool = False
    """Whether the result is the argmax of each row (`highest`): greedy decoding needs no logits, so a kernel stores
    none."""


PLAIN = Epilogue()


@dataclass(frozen=True, slots=True)
class Unnormed:
    """The input of a product before residual add and norm. Its reader does both and stores the new residual stream in
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


FEW_ROWS = 4


def normed_rows(weight: QTensor) -> int:
    """Largest row count for which layers fuse the norm into the product: each program of a kernel repeats the norm."""
    return FEW_ROWS if weight.is_dense else 1


def highest(scores: Tensor) -> Tensor:
    """Argmax of each row, the first among equals; -1 if the maximum is not finite or any score is NaN."""
    top, index = scores.max(-1)
    return torch.where(top.isfinite(), index, -1)


def _product_cost(x: Tensor, weight: QTensor, epilogue: Epilogue) -> Cost:
    rows, out = x.numel() // x.shape[-1], weight.shape[0]
    flops = product_flops(rows, weight) + (4.5 * rows * out if epilogue.gate else 0.0)
    written = rows * (out // 2 if epilogue.gate else out) * x.element_size()
    return Cost(flops, nbytes(x, weight, epilogue.bias), rows * 8 if epilogue.best else written)


def _product_shape(x: Tensor | Unnormed, weight: QTensor, epilogue: Epilogue = PLAIN) -> Tensor:
    like, out = x.x if isinstance(x, Unnormed) else x, weight.shape[0]
    if epilogue.best:
        return like.new_empty(*like.shape[:-1], dtype=torch.int64)
    return like.new_empty(*like.shape[:-1], out // 2 if epilogue.gate else out)


Multiply = Callable[[Tensor, QTensor, Tensor | None], Tensor]
"""x, weight and bias -> the product."""
Counted = Callable[[Cost, Tensor, QTensor], Cost]
"""The cost of a product in the computation's dtype, x and weight -> its own cost."""


def product(counted: Counted = lambda cost, x, weight: cost) -> Callable[[Multiply], Operation]:
    """The operation that reads its input, which may be `Unnormed`, multiplies as decorated, and does what follows."""

    def register(multiply: Multiply) -> Operation:
        def body(x: Tensor | Unnormed, weight: QTensor, epilogue: Epilogue = PLAIN) -> Tensor:
            y = multiply(x.read() if isinstance(x, Unnormed) else x, weight, epilogue.bias)
            if epilogue.gate:
                y = activate_mul.body(*y.chunk(2, -1), epilogue.gate)
            return highest(y) if epilogue.best else y

        def cost(x: Tensor | Unnormed, weight: QTensor, epilogue: Epilogue = PLAIN) -> Cost:
            if isinstance(x, Unnormed):
                return cost(x.x, weight, epilogue) + x.cost
            return counted(_product_cost(x, weight, epilogue), x, weight)

        body.__name__ = multiply.__name__
        return op(cost=cost, shape=_product_shape)(body)

    return register


def rounding(operands: Operands) -> Callable[[Multiply], Operation]:
    """The operation of a product that rounds its operands."""
    return product(lambda cost, x, weight: cost.on(operands))


@product()
def linear(x: Tensor, weight: QTensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias, weight-only quantization: activations keep their dtype."""
    return torch.nn.functional.linear(x, weight.dequantize(x.dtype), bias)


GROUP = 32
"""Activations per quantization group."""


def quantized_groups(x: Tensor) -> Tensor:
    """x quantized to int8 with one scale per group of columns (absolute maximum -> 127) and dequantized."""
    groups = wide(x).unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest > 0, 127 / largest, 0)
    return ((groups * inverse).round() * (largest / 127)).flatten(-2).to(x.dtype)


@rounding("int8")
def linear_int8(x: Tensor, weight: QTensor, bias: Tensor | None) -> Tensor:
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


@rounding("int8")
def linear_hadamard(x: Tensor, weight: QTensor, bias: Tensor | None) -> Tensor:
    """Lossy, for many rows: activations and weights are Hadamard-transformed, then quantized to int8 with one scale per
    row and per output. A kernel may round activations to bfloat16 first, and compute few rows as `linear_int8`."""
    rows, weights = quantized_rows(hadamard(x)), quantized_rows(hadamard(weight.dequantize(x.dtype)))
    return torch.nn.functional.linear(rows, weights, None if bias is None else wide(bias)).to(x.dtype)


@rounding("bf16")
def linear_bf16(x: Tensor, weight: QTensor, bias: Tensor | None) -> Tensor:
    """Activations are rounded to bfloat16 before the GEMM; the accumulator has the dtype of x. A kernel may also round
    block-quantized weights to bfloat16."""
    return torch.nn.functional.linear(x.to(torch.bfloat16).to(x.dtype), weight.dequantize(x.dtype), bias)


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
