"""RoPE in C++: the rotation is bitwise equal to the body, the angles agree to the last place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bankfull.ops.native.checks import float_rows, integers, isa_is_chosen
from bankfull.ops.native.extension import required
from bankfull.ops.rope.body import rope_angles, rotate

_native = required()


def _accepts(*, dtype: torch.dtype | None = None, **facts: Any) -> bool:
    return dtype == torch.float32 and isa_is_chosen()


@rope_angles.provider("native", on="cpu", accepts=_accepts)
def run_rope_angles(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if dtype is not torch.float32 or frequencies.dtype is not torch.float32:
        return rope_angles.body(positions, frequencies, scale, dtype)
    places, rates = integers(positions), float_rows(frequencies)
    cos, sin = (torch.empty(len(places), len(rates)) for _ in range(2))
    _native.rope_angles(
        places.data_ptr(), rates.data_ptr(), cos.data_ptr(), sin.data_ptr(), len(places), len(rates), scale
    )
    return cos, sin


@rotate.provider("native", on="cpu", accepts=_accepts)
def run_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    tokens, heads, size = x.shape
    half = cos.shape[1]
    if cos.shape != sin.shape or cos.shape[0] != tokens or 2 * half > size:
        raise ValueError(f"rotate: angles of shape {tuple(cos.shape)} do not match heads of shape {tuple(x.shape)}")
    rows, cosines, sines = float_rows(x), float_rows(cos), float_rows(sin)
    y = torch.empty_like(rows)
    if heads:
        _native.rotate(rows.data_ptr(), cosines.data_ptr(), sines.data_ptr(), y.data_ptr(), tokens, heads, size, half)
    return y
