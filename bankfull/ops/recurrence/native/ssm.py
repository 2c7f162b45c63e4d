"""Mamba's convolution and scan in C++, bitwise identical in one call, in chunks and token by token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bankfull.ops.native.checks import address, dense_floats, float_rows, integers, isa_is_chosen, token_rows
from bankfull.ops.native.extension import required
from bankfull.ops.recurrence.ssm import RecurrentMeta, causal_conv, causal_conv_silu, selective_scan

_native = required()


def _accepts(*, dtype: torch.dtype | None = None, **facts: Any) -> bool:
    return dtype == torch.float32 and isa_is_chosen()


def slots_of(meta: RecurrentMeta) -> tuple[Tensor, Tensor, int]:
    """Slots to read, slots to write, and the number of slots a sequence may write."""
    read, write = integers(meta.read), integers(meta.write)
    sequences = len(meta.kept)
    if read.shape != (sequences,) or write.dim() != 2 or write.shape[0] != sequences:
        raise ValueError("recurrent: each sequence needs one slot to read and one row of slots to write")
    return read, write, write.shape[1]


@causal_conv.provider("native", on="cpu", accepts=_accepts)
def run_causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, meta: RecurrentMeta) -> Tensor:
    return _convolve(x, weight, bias, state, meta, False)


@causal_conv_silu.provider("native", on="cpu", accepts=_accepts)
def run_causal_conv_silu(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, meta: RecurrentMeta) -> Tensor:
    return _convolve(x, weight, bias, state, meta, True)


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, meta: RecurrentMeta, silu: bool) -> Tensor:
    tokens, channels = x.shape
    width = weight.shape[1]
    if weight.shape[0] != channels or state.shape[1:] != (channels, width - 1):
        raise ValueError(f"causal_conv: {channels} channels do not match a state of shape {tuple(state.shape)}")
    if bias is not None and bias.shape != (channels,):
        raise ValueError(f"causal_conv: {channels} channels do not match a bias of shape {tuple(bias.shape)}")
    rows, taps, wide_bias = token_rows(x), float_rows(weight), None if bias is None else float_rows(bias)
    read, write, most = slots_of(meta)
    y = torch.empty(x.shape)
    _native.causal_conv(
        rows.data_ptr(),
        taps.data_ptr(),
        address(wide_bias),
        dense_floats(state).data_ptr(),
        y.data_ptr(),
        meta.q_start,
        meta.kept,
        read.data_ptr(),
        write.data_ptr(),
        most,
        most,
        state.shape[0],
        tokens,
        channels,
        width,
        rows.stride(0),
        silu,
    )
    return y


@selective_scan.provider("native", on="cpu", accepts=_accepts)
def run_selective_scan(
    x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor, meta: RecurrentMeta
) -> Tensor:
    tokens, channels = x.shape
    size = a.shape[1]
    fits = a.shape[0] == channels and state.shape[1:] == (channels, size) and d.shape == (channels,)
    if not fits or delta.shape != x.shape or b.shape != (tokens, size) or c.shape != (tokens, size):
        raise ValueError(
            f"selective_scan: {channels} channels x {size} do not match a state of shape {tuple(state.shape)}"
        )
    rows, steps, decay, skip = float_rows(x), float_rows(delta), float_rows(a), float_rows(d)
    into, out = token_rows(b), token_rows(c)
    read, write, most = slots_of(meta)
    y = torch.empty_like(rows)
    _native.selective_scan(
        rows.data_ptr(),
        steps.data_ptr(),
        decay.data_ptr(),
        into.data_ptr(),
        out.data_ptr(),
        skip.data_ptr(),
        dense_floats(state).data_ptr(),
        y.data_ptr(),
        into.stride(0),
        out.stride(0),
        meta.q_start,
        meta.kept,
        read.data_ptr(),
        write.data_ptr(),
        most,
        most,
        state.shape[0],
        tokens,
        channels,
        size,
    )
    return y
