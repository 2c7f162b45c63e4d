"""Linear attention and the delta rule in C++, bitwise identical in one call, in chunks and token by token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bankfull.ops.native.checks import address, dense_floats, float_rows, isa_is_chosen
from bankfull.ops.native.extension import required
from bankfull.ops.recurrence.delta import delta_rule
from bankfull.ops.recurrence.linear_attention import linear_attention, taylor_features, taylor_size
from bankfull.ops.recurrence.native.ssm import slots_of
from bankfull.ops.recurrence.ssm import RecurrentMeta

_native = required()


def _accepts(*, dtype: torch.dtype | None = None, **facts: Any) -> bool:
    return dtype == torch.float32 and isa_is_chosen()


def _token_rows(x: Tensor) -> Tensor:
    """x itself if each token is contiguous: queries, keys and values are slices of one projection."""
    if x.dtype is torch.float32 and x.is_cpu and x[:1].is_contiguous():
        return x
    return float_rows(x)


def taylor_factors(size: int) -> tuple[float, float]:
    """Factors of single elements and of pairs."""
    return size**-0.25, (2 * size) ** -0.5


@taylor_features.provider("native", on="cpu", accepts=_accepts)
def run_taylor_features(x: Tensor) -> Tensor:
    tokens, heads, size = x.shape
    rows = _token_rows(x)
    y = rows.new_empty(tokens, heads, taylor_size(size))
    single, pair = taylor_factors(size)
    _native.taylor_features(rows.data_ptr(), y.data_ptr(), rows.stride(0), tokens, heads, size, single, pair)
    return y


@linear_attention.provider("native", on="cpu", accepts=_accepts)
def run_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, state: Tensor, normalizer: Tensor | None, meta: RecurrentMeta
) -> Tensor:
    tokens, heads, key = q.shape
    value = v.shape[2]
    fits = k.shape == q.shape and v.shape[:2] == q.shape[:2] and slopes.shape == (heads,)
    if normalizer is not None:
        fits = fits and normalizer.shape == (state.shape[0], heads, key)
    if not fits or state.shape[1:] != (heads, key, value):
        raise ValueError(
            f"linear_attention: {heads} heads of {key} x {value} do not match a state of shape {tuple(state.shape)}"
        )
    queries, keys, values, rates = _token_rows(q), _token_rows(k), _token_rows(v), float_rows(slopes)
    read, write, most = slots_of(meta)
    y = torch.empty(v.shape)
    _native.linear_attention(
        queries.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        rates.data_ptr(),
        dense_floats(state).data_ptr(),
        address(None if normalizer is None else dense_floats(normalizer)),
        y.data_ptr(),
        queries.stride(0),
        keys.stride(0),
        values.stride(0),
        meta.q_start,
        meta.kept,
        read.data_ptr(),
        write.data_ptr(),
        most,
        most,
        state.shape[0],
        tokens,
        heads,
        key,
        value,
    )
    return y


@delta_rule.provider("native", on="cpu", accepts=_accepts)
def run_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    rate: Tensor,
    shift: Tensor,
    state: Tensor,
    meta: RecurrentMeta,
) -> Tensor:
    (tokens, key_heads, key), (heads, value) = q.shape, v.shape[1:]
    fits = k.shape == q.shape and v.shape[0] == tokens and a.shape == b.shape == (tokens, heads)
    fits = fits and rate.shape == shift.shape == (heads,) and heads % key_heads == 0
    if not fits or state.shape[1:] != (heads, key, value):
        raise ValueError(
            f"delta_rule: {heads} heads of {key} x {value} do not match a state of shape {tuple(state.shape)}"
        )
    parts = [_token_rows(x) for x in (q, k, v, a, b)]
    rates, shifts = float_rows(rate), float_rows(shift)
    read, write, most = slots_of(meta)
    y = torch.empty(v.shape)
    _native.delta_rule(
        *(part.data_ptr() for part in parts),
        rates.data_ptr(),
        shifts.data_ptr(),
        dense_floats(state).data_ptr(),
        y.data_ptr(),
        tuple(part.stride(0) for part in parts),
        meta.q_start,
        meta.kept,
        read.data_ptr(),
        write.data_ptr(),
        most,
        most,
        state.shape[0],
        tokens,
        key_heads,
        heads,
        key,
        value,
    )
    return y
