"""Mamba-2's recurrence (SSD): heads with one scalar decay each, and the gated norm after it."""

from __future__ import annotations

import torch
from torch import Tensor

from bankfull.ops.cost import Cost, nbytes
from bankfull.ops.norm.body import wide
from bankfull.ops.recurrence.ssm import RecurrentMeta, moved_slots
from bankfull.ops.registry import op
from bankfull.ops.shapes import like_first

Limits = tuple[float, float]


def time_steps(dt: Tensor, bias: Tensor, limits: Limits) -> Tensor:
    """softplus(dt + bias) within the limits, in at least float32."""
    return torch.nn.functional.softplus(wide(dt) + wide(bias)).clamp(*limits)


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
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    heads = x.shape[1]
    steps, xs, rate, skip = time_steps(dt, bias, limits), wide(x), wide(a), wide(d)
    bs, cs = (wide(part).repeat_interleave(heads // part.shape[1], dim=1) for part in (b, c))
    for i, kept in enumerate(meta.kept.tolist()):
        first, last = int(meta.q_start[i]), int(meta.q_start[i + 1])
        h = state.index_select(0, meta.read[i : i + 1])[0].to(xs.dtype)
        for t in range(first, last):
            decay = torch.exp(steps[t] * rate)[:, None, None]
            h = decay * h + (steps[t][:, None] * xs[t])[:, :, None] * bs[t][:, None, :]
            out[t] = ((h * cs[t][:, None, :]).sum(-1) + skip[:, None] * xs[t]).to(x.dtype)
            j = kept - (last - t)
            if j >= 0:
                state.index_copy_(0, meta.write[i, j : j + 1], h[None].to(state.dtype))
    return out


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
