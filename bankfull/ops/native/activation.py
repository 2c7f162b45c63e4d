"""Pointwise non-linearities in C++."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bankfull.ops.native.checks import float_rows, isa_is_chosen
from bankfull.ops.native.extension import required
from bankfull.ops.reference.activation import activate, activate_mul, soft_cap

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
