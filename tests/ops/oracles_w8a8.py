"""Products with activations that are rounded per token, in numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bankfull.weights.qtensor import QTensor
from tests.ops import oracles
from tests.ops.oracles import Array


def _float8(numbers: Array) -> Array:
    """Four bits of mantissa, ties to even; below 2 ** -6 multiples of 2 ** -9."""
    exponent = np.maximum(np.frexp(numbers)[1], -5)
    return np.ldexp(np.rint(np.ldexp(numbers, 4 - exponent)), exponent - 4)


def rounded(x: Tensor, weight: QTensor) -> Tensor:
    """Codes are rounded in the operation's precision: a tie must fall the same way."""
    rows = x.numpy().copy() if x.dtype == torch.float64 else x.to(torch.float32).numpy().copy()
    for row in rows:
        largest = abs(row).max()
        if weight.scheme.name == "fp8":
            scale = largest / row.dtype.type(448)
            row[:] = _float8((row / scale).astype(np.float32)) * scale
        else:
            row[:] = np.rint(row * (row.dtype.type(127) / largest)) * (largest / row.dtype.type(127))
    return torch.from_numpy(rows).to(x.dtype)


def linear_w8a8(x: Tensor, weight: QTensor, bias: Tensor | None = None) -> Array:
    return oracles.linear(rounded(x, weight), weight, bias)


ORACLES: dict[str, Callable[..., Any]] = {"linear_w8a8": oracles.with_epilogue(linear_w8a8)}
