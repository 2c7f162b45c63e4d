"""Normalization in C++."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bankfull.ops.native.checks import float_rows, isa_is_chosen
from bankfull.ops.native.extension import required
from bankfull.ops.norm.body import add, add_rms_norm, layer_norm, rms_norm
from bankfull.ops.pointwise.native import CODES

_native = required()


def _accepts(*, dtype: torch.dtype | None = None, weight: Any = None, **facts: Any) -> bool:
    # The result has the weight's dtype, and the kernel writes float32.
    alike = weight is None or getattr(weight, "dtype", None) is torch.float32
    return dtype == torch.float32 and alike and isa_is_chosen()


@rms_norm.provider("native", on="cpu", accepts=_accepts)
def run_rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    columns = weight.shape[0]
    if x.shape[-1] != columns:
        raise ValueError(f"rms_norm: the input has {x.shape[-1]} columns, the weight {columns}")
    rows, gain = float_rows(x), float_rows(weight)
    y = torch.empty_like(rows)
    count = rows.numel() // columns
    _native.rms_norm(rows.data_ptr(), 0, 0, gain.data_ptr(), y.data_ptr(), count, columns, eps, offset)
    return y


@add_rms_norm.provider("native", on="cpu", accepts=_accepts)
def run_add_rms_norm(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    columns = weight.shape[0]
    if x.shape[-1] != columns or delta.shape != x.shape:
        raise ValueError(f"add_rms_norm: {tuple(x.shape)}, {tuple(delta.shape)} and a weight of {columns} do not match")
    rows, branch, gain = float_rows(x), float_rows(delta), float_rows(weight)
    joined, y = torch.empty_like(rows), torch.empty_like(rows)
    _native.rms_norm(
        rows.data_ptr(),
        branch.data_ptr(),
        joined.data_ptr(),
        gain.data_ptr(),
        y.data_ptr(),
        rows.numel() // columns,
        columns,
        eps,
        offset,
    )
    return joined, y


@layer_norm.provider("native", on="cpu", accepts=_accepts)
def run_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    columns = weight.shape[0]
    if x.shape[-1] != columns or bias.shape != (columns,):
        raise ValueError(f"layer_norm: the input has {x.shape[-1]} columns, the weight {columns}")
    rows, gain, shift = float_rows(x), float_rows(weight), float_rows(bias)
    y = torch.empty_like(rows)
    _native.layer_norm(
        rows.data_ptr(), gain.data_ptr(), shift.data_ptr(), y.data_ptr(), rows.numel() // columns, columns, eps
    )
    return y


@add.provider("native", on="cpu", accepts=_accepts)
def run_add(x: Tensor, delta: Tensor) -> Tensor:
    if x.dtype is not torch.float32 or delta.dtype is not torch.float32 or x.shape != delta.shape:
        return add.body(x, delta)  # the residual stream may have a wider dtype than the branch
    rows, branch = float_rows(x), float_rows(delta)
    y = torch.empty_like(rows)
    _native.pointwise(CODES["plus"], rows.data_ptr(), branch.data_ptr(), y.data_ptr(), rows.numel(), 0.0)
    return y
