"""Tolerances of comparisons."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: Largest error relative to the largest expected value.
TOLERANCE = {
    torch.float64: 1e-11,
    torch.float32: 2e-5,
    torch.bfloat16: 2e-2,
    torch.int8: 4e-2,  # two sums of codes are multiplied, and one side may not round activations
    torch.float8_e4m3fn: 8e-2,
}


def tensors(value: Any) -> list[Tensor]:
    if value is None:
        return []
    return [value] if isinstance(value, Tensor) else list(value)


def assert_close(got: Any, expected: Any, dtype: torch.dtype) -> None:
    """Tensor by tensor; NaN must appear exactly where it is expected."""
    found, wanted = tensors(got), tensors(expected)
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        one, other = one.detach().cpu().double(), other.detach().cpu().double()
        assert torch.equal(one.isnan(), other.isnan())
        if not one.numel():
            continue
        one, other = one.nan_to_num(), other.nan_to_num()
        error, scale = (one - other).abs().max().item(), other.abs().max().item()
        assert error <= TOLERANCE[dtype] * max(scale, 1e-3), f"error {error:.3g} at scale {scale:.3g}"
