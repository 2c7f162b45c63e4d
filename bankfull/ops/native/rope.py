"""Rotary positions in C++: equal to the body bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bankfull.ops.native.checks import float_rows, isa_is_chosen
from bankfull.ops.native.extension import required
from bankfull.ops.reference.rope import rotate

_native = required()


def _accepts(*, dtype: torch.dtype | None = None, **facts: Any) -> bool:
    return dtype == torch.float32 and isa_is_chosen()


@rotate.provider("native", on="cpu", accepts=_accepts)
def run_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    tokens, heads, size = x.shape
    half = cos.shape[1]
    if cos.shape != sin.shape or cos.shape[0] != tokens or 2 * half > size:
        raise ValueError(f"rotate: angles of shape {tuple(cos.shape)} do not fit heads of shape {tuple(x.shape)}")
    rows, cosines, sines = float_rows(x), float_rows(cos), float_rows(sin)
    y = torch.empty_like(rows)
    if heads:
        _native.rotate(rows.data_ptr(), cosines.data_ptr(), sines.data_ptr(), y.data_ptr(), tokens, heads, size, half)
    return y
