"""Pointwise non-linearities, and operations on the columns of rows, in C++."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bankfull.ops.native.checks import float_rows, isa_is_chosen, token_rows
from bankfull.ops.native.extension import required
from bankfull.ops.pointwise.body import activate, activate_mul, gather_columns, scale_columns, soft_cap

_native = required()

CODES: dict[str, int] = _native.functions()

GATES = frozenset(CODES[kind] for kind in ("silu", "gelu", "gelu_tanh", "relu"))
"""Activations that packed GEMMs can fuse into their epilogue for gated layers."""


def _accepts(*, dtype: torch.dtype | None = None, **facts: Any) -> bool:
    return dtype == torch.float32 and isa_is_chosen()


@activate.provider("native", on="cpu", accepts=_accepts)
def run_activate(x: Tensor, kind: str) -> Tensor:
    rows = float_rows(x)
    y = torch.empty_like(rows)
    _native.pointwise(CODES[kind], rows.data_ptr(), 0, y.data_ptr(), rows.numel(), 0.0)
    return y


@activate_mul.provider("native", on="cpu", accepts=_accepts)
def run_activate_mul(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    if gate.shape != up.shape:
        return activate_mul.body(gate, up, kind)
    rows, factor = float_rows(gate), float_rows(up)
    y = torch.empty_like(rows)
    _native.pointwise(CODES[kind], rows.data_ptr(), factor.data_ptr(), y.data_ptr(), rows.numel(), 0.0)
    return y


@soft_cap.provider("native", on="cpu", accepts=_accepts)
def run_soft_cap(x: Tensor, cap: float) -> Tensor:
    rows = float_rows(x)
    y = torch.empty_like(rows)
    _native.pointwise(CODES["soft_cap"], rows.data_ptr(), 0, y.data_ptr(), rows.numel(), cap)
    return y


@scale_columns.provider("native", on="cpu", accepts=_accepts)
def run_scale_columns(x: Tensor, factors: Tensor) -> Tensor:
    if x.dim() != 2 or factors.shape != x.shape[1:]:
        raise ValueError(f"scale_columns: {tuple(x.shape)} and {tuple(factors.shape)} do not match")
    rows, gain = token_rows(x), float_rows(factors)
    y = torch.empty(x.shape)
    _native.scale_columns(rows.data_ptr(), gain.data_ptr(), y.data_ptr(), len(x), x.shape[1], rows.stride(0))
    return y


@gather_columns.provider("native", on="cpu", accepts=_accepts)
def run_gather_columns(x: Tensor, columns: Tensor) -> Tensor:
    if columns.dtype is not torch.int32 or not columns.is_cpu or not columns.is_contiguous():
        raise ValueError(f"gather_columns: columns are {columns.dtype} on {columns.device}, or strided")
    rows = token_rows(x) if x.dim() == 2 else float_rows(x).reshape(-1, x.shape[-1])
    y = torch.empty(*x.shape[:-1], len(columns))
    _native.gather_columns(
        rows.data_ptr(), columns.data_ptr(), y.data_ptr(), len(rows), len(columns), x.shape[-1], rows.stride(0)
    )
    return y
