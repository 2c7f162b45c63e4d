"""Mamba-2's recurrence (SSD): heads with one scalar decay each, and the gated norm after it."""

from __future__ import annotations

import torch
from torch import Tensor

from bankfull.ops.cost import Cost, nbytes
from bankfull.ops.norm.body import wide
from bankfull.ops.recurrence.linear_attention import decayed_attention
from bankfull.ops.recurrence.ssm import RecurrentMeta, advance, moved_slots
from bankfull.ops.registry import op
from bankfull.ops.shapes import like_first

Limits = tuple[float, float]


def time_steps(dt: Tensor, bias: Tensor, limits: Limits) -> Tensor:
    """softplus(dt + bias) within the limits, in at least float32."""
    return torch.nn.functional.softplus(wide(dt) + wide(bias)).clamp(*limits)


def state_space(
    x: Tensor, steps: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """h = exp(s a) h + s x b^T;  y = h c + d x, per head: the outputs, and the state after them. A head is linear
    attention from b to c over the channels, with a decay that depends on the token.

    x (..., tokens, heads, size), steps (..., tokens, heads), b, c (..., tokens, groups, n): each group serves
    heads / groups heads. a, d (heads); state (..., heads, size, n).
    """
    heads = x.shape[-2]
    bs, cs = (part.repeat_interleave(heads // part.shape[-2], -2).transpose(-2, -3) for part in (b, c))
    vs = (steps[..., None] * x).transpose(-2, -3)
    y, h = decayed_attention(cs, bs, vs, (steps * a).mT, None if state is None else state.mT)
    return y.transpose(-2, -3) + d[:, None] * x, h.mT


def _ssd_cost(
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
) -> Cost:
    read, write = moved_slots(state, meta)
    heads, size = x.shape[1:]
    per_token = heads * size * (b.shape[2] * 5.0 + 3.0) + heads * 10.0
    return Cost(per_token * x.shape[0], nbytes(x, dt, a, b, c, d, bias) + read, nbytes(x) + write)


@op(cost=_ssd_cost, shape=like_first)
def ssd_scan(
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
    """h = exp(s a) h + s x b^T;  y = h c + d x, per head, with s = softplus(dt + bias) within the limits.

    x (tokens, heads, size), dt (tokens, heads), b, c (tokens, groups, n): each group serves heads / groups heads.
    a, d, bias (heads); state (slots, heads, size, n) in at least float32.
    """
    steps, (xs, rate, bs, cs, skip) = time_steps(dt, bias, limits), (wide(part) for part in (x, a, b, c, d))
    return advance(
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
        (state,),
        meta,
        lambda at, h: state_space(xs[at], steps[at], rate, bs[at], cs[at], skip, h),
    )


def _gated_rms_norm_cost(x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int, before: bool) -> Cost:
    return Cost(13.0 * x.numel(), nbytes(x, gate, weight), nbytes(x))


@op(cost=_gated_rms_norm_cost, shape=like_first)
def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int, before: bool) -> Tensor:
    """The RMS norm of x silu(gate), each of `groups` equal parts of a row by itself. `before`: the norm of x comes
    first, then the gate."""
    y, opened = wide(x), torch.nn.functional.silu(wide(gate))
    if not before:
        y = y * opened
    parts = y.unflatten(-1, (groups, -1))
    y = (parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps)).flatten(-2) * wide(weight)
    return (y * opened if before else y).to(x.dtype)
