"""Linear layers with 8-bit weights and 8-bit activations (w8a8): both have one scale per row, and products are summed
in the 8-bit type's own arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

from bankfull.ops.cost import Operands
from bankfull.ops.norm.body import wide
from bankfull.ops.products.body import product, quantized_rows
from bankfull.weights.qtensor import QTensor

LARGEST_FP8 = 448.0
"""The largest float8_e4m3fn."""
SCHEMES = ("int8_row", "fp8")
"""Weights whose rows have one scale each."""


def weight_operands(weight: QTensor) -> Operands:
    """The 8-bit type that activations are rounded to."""
    return "fp8" if weight.scheme.name == "fp8" else "int8"


def rounded_per_token(x: Tensor, scheme: str) -> Tensor:
    """Each row of x rounded to the 8-bit type of a weight, with the row's absolute maximum as the largest number."""
    numbers = wide(x)
    if scheme != "fp8":
        return quantized_rows(numbers).to(x.dtype)
    scale = numbers.abs().amax(-1, keepdim=True) / LARGEST_FP8
    codes = torch.where(scale > 0, numbers / scale, 0).clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float32)
    return (codes.to(torch.float8_e4m3fn).to(numbers.dtype) * scale).to(x.dtype)


@product(lambda cost, x, weight: cost.on(weight_operands(weight)))
def linear_w8a8(x: Tensor, weight: QTensor, bias: Tensor | None) -> Tensor:
    """Lossy: activations are rounded to the weight's 8-bit type, with one scale per token. A kernel may keep the
    activations of a few rows as they are; one that norms rounds them in the same pass."""
    return torch.nn.functional.linear(rounded_per_token(x, weight.scheme.name), weight.dequantize(x.dtype), bias)
