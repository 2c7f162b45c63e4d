"""Linear layers with 8-bit weights and 8-bit activations (w8a8): both have one scale per row, and products are summed
in the 8-bit type's own arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bankfull.ops.cost import Cost, Operands
from bankfull.ops.norm.body import wide
from bankfull.ops.pointwise.body import activate_mul
from bankfull.ops.products.body import (
    Unnormed,
    best_cost,
    best_shape,
    gated_cost,
    gated_shape,
    highest,
    linear_cost,
    linear_shape,
    quantized_rows,
)
from bankfull.ops.registry import op
from bankfull.weights.qtensor import QTensor

LARGEST_FP8 = 448.0
"""The largest float8_e4m3fn."""
SCHEMES = ("int8_row", "fp8")
"""Weights whose rows have one scale each."""


def weight_operands(weight: QTensor) -> Operands:
    """The 8-bit type that activations are rounded to."""
    return "fp8" if weight.scheme.name == "fp8" else "int8"


def _rounded(cost: Callable[..., Cost]) -> Callable[..., Cost]:
    """The cost with operands of the weight's type."""
    return lambda x, weight, *others: cost(x, weight, *others).on(weight_operands(weight))


_linear_cost, _best_cost, _gated_cost = _rounded(linear_cost), _rounded(best_cost), _rounded(gated_cost)


def rounded_per_token(x: Tensor, scheme: str) -> Tensor:
    """Each row of x rounded to the 8-bit type of a weight, with the row's absolute maximum as the largest number."""
    numbers = wide(x)
    if scheme != "fp8":
        return quantized_rows(numbers).to(x.dtype)
    scale = numbers.abs().amax(-1, keepdim=True) / LARGEST_FP8
    codes = torch.where(scale > 0, numbers / scale, 0).clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float32)
    return (codes.to(torch.float8_e4m3fn).to(numbers.dtype) * scale).to(x.dtype)


@op(cost=_linear_cost, shape=linear_shape)
def linear_w8a8(x: Tensor, weight: QTensor, bias: Tensor | None = None) -> Tensor:
    """Lossy: activations are rounded to the weight's 8-bit type, with one scale per token. A kernel may keep the
    activations of a few rows as they are."""
    return torch.nn.functional.linear(rounded_per_token(x, weight.scheme.name), weight.dequantize(x.dtype), bias)


@op(cost=_best_cost, shape=best_shape)
def best_output_w8a8(x: Tensor, weight: QTensor, bias: Tensor | None = None) -> Tensor:
    """Argmax over the outputs of `linear_w8a8`."""
    return highest(linear_w8a8.body(x, weight, bias))


@op(cost=_gated_cost, shape=gated_shape)
def gated_linear_w8a8(x: Tensor, weight: QTensor, bias: Tensor | None, kind: str) -> Tensor:
    """`gated_linear` of `linear_w8a8`."""
    gate, up = linear_w8a8.body(x, weight, bias).chunk(2, -1)
    return activate_mul.body(gate, up, kind)


@op(
    cost=lambda x, weight, bias=None: _linear_cost(x.x, weight, bias) + x.cost,
    shape=lambda x, weight, bias=None: linear_shape(x.x, weight, bias),
)
def normed_linear_w8a8(x: Unnormed, weight: QTensor, bias: Tensor | None = None) -> Tensor:
    """`linear_w8a8` with a fused input norm, which rounds the activations in the same pass."""
    return linear_w8a8.body(x.read(), weight, bias)


@op(
    cost=lambda x, weight, bias, kind: _gated_cost(x.x, weight, bias, kind) + x.cost,
    shape=lambda x, weight, bias, kind: gated_shape(x.x, weight, bias, kind),
)
def normed_gated_linear_w8a8(x: Unnormed, weight: QTensor, bias: Tensor | None, kind: str) -> Tensor:
    """`gated_linear_w8a8` with a fused input norm."""
    return gated_linear_w8a8.body(x.read(), weight, bias, kind)
