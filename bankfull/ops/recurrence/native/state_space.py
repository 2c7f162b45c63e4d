"""Mamba-2's recurrence and gated norm, and S4's recurrence, in C++: bitwise identical in one call, in chunks and token
by token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bankfull.ops.native.checks import dense_floats, float_rows, integers, isa_is_chosen, token_rows
from bankfull.ops.native.extension import required
from bankfull.ops.recurrence.native.ssm import slots_of
from bankfull.ops.recurrence.s4 import diagonal_scan
from bankfull.ops.recurrence.ssd import Limits, gated_rms_norm, ssd_scan
from bankfull.ops.recurrence.ssm import RecurrentMeta

_native = required()


def _accepts(*, dtype: torch.dtype | None = None, **facts: Any) -> bool:
    return dtype == torch.float32 and isa_is_chosen()


def _with_slots(run: Any, state: Tensor, meta: RecurrentMeta, *args: Any) -> None:
    """Call a kernel with the addresses of the slots; the tensors behind them live until it returns."""
    read, write, most = slots_of(meta)
    q_start, kept = (integers(torch.from_numpy(numbers)) for numbers in (meta.q_start, meta.kept))
    if len(q_start) != len(kept) + 1:
        raise ValueError("recurrent: q_start must have one entry more than kept")
    addresses = (numbers.data_ptr() for numbers in (q_start, kept, read, write))
    run(_native.Slots(*addresses, len(kept), most, state.shape[0]), *args)


@ssd_scan.provider("native", on="cpu", accepts=_accepts)
def run_ssd_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    bias: Tensor,
    limits: Limits,
    state: Tensor,
    meta: RecurrentMeta,
) -> Tensor:
    (tokens, heads, size), (groups, n) = x.shape, b.shape[1:]
    fits = b.shape == c.shape == (tokens, groups, n) and dt.shape == (tokens, heads) and heads % groups == 0
    if not fits or state.shape[1:] != (heads, size, n) or not a.shape == d.shape == bias.shape == (heads,):
        raise ValueError(f"ssd_scan: {heads} heads of {size} x {n} do not match a state of shape {tuple(state.shape)}")
    rows, steps, into, out = token_rows(x), token_rows(dt), token_rows(b), token_rows(c)
    rate, skip, shift = float_rows(a), float_rows(d), float_rows(bias)
    y = torch.empty(x.shape)
    if not tokens:
        return y
    _with_slots(
        _native.ssd_scan,
        state,
        meta,
        rows.data_ptr(),
        steps.data_ptr(),
        rate.data_ptr(),
        into.data_ptr(),
        out.data_ptr(),
        skip.data_ptr(),
        shift.data_ptr(),
        dense_floats(state).data_ptr(),
        y.data_ptr(),
        tokens,
        heads,
        size,
        n,
        groups,
        rows.stride(0),
        steps.stride(0),
        into.stride(0),
        out.stride(0),
        *limits,
    )
    return y


@gated_rms_norm.provider("native", on="cpu", accepts=_accepts)
def run_gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int, before: bool) -> Tensor:
    columns = weight.shape[0]
    if x.dim() != 2 or x.shape[1] != columns or gate.shape != x.shape or columns % groups:
        raise ValueError(
            f"gated_rms_norm: {tuple(x.shape)}, {tuple(gate.shape)} and a weight of {columns} do not match"
        )
    rows, opening, gain = float_rows(x), token_rows(gate), float_rows(weight)
    y = torch.empty(x.shape)
    _native.gated_rms_norm(
        rows.data_ptr(),
        opening.data_ptr(),
        gain.data_ptr(),
        y.data_ptr(),
        len(x),
        columns,
        groups,
        opening.stride(0),
        eps,
        before,
    )
    return y


@diagonal_scan.provider("native", on="cpu", accepts=_accepts)
def run_diagonal_scan(x: Tensor, decay: Tensor, out: Tensor, d: Tensor, state: Tensor, meta: RecurrentMeta) -> Tensor:
    tokens, channels = x.shape
    pairs = decay.shape[1]
    shape = (2, pairs, channels)
    if not decay.shape == out.shape == state.shape[1:] == shape or d.shape != (channels,):
        raise ValueError(
            f"diagonal_scan: {channels} channels x {pairs} do not match a state of shape {tuple(state.shape)}"
        )
    rows, factor, leave, skip = token_rows(x), float_rows(decay), float_rows(out), float_rows(d)
    y = torch.empty(x.shape)
    if not tokens:
        return y
    _with_slots(
        _native.diagonal_scan,
        state,
        meta,
        rows.data_ptr(),
        factor.data_ptr(),
        leave.data_ptr(),
        skip.data_ptr(),
        dense_floats(state).data_ptr(),
        y.data_ptr(),
        tokens,
        channels,
        pairs,
        rows.stride(0),
    )
    return y
