"""The gated delta rule: a matrix per head that forgets, and replaces what it holds for a key by the key's new value."""

from __future__ import annotations

import torch
from torch import Tensor

from bankfull.ops.cost import Cost, nbytes
from bankfull.ops.norm.body import wide
from bankfull.ops.recurrence.linear_attention import decays
from bankfull.ops.recurrence.ssm import CHUNK, RecurrentMeta, advance, moved_slots
from bankfull.ops.registry import op

UNIT_EPS = 1e-6
"""Added to the squared length of queries and keys before they are divided by it."""


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPS)


def delta_attention(
    q: Tensor, k: Tensor, v: Tensor, log_keep: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """h = exp(log_keep) h;  h = h + k (beta (v - k h))^T;  y = q h: the outputs, and the state after them.

    Within a chunk the corrected values u solve a unit lower triangular system: each one depends on those before it
    through the products of their keys. q, k (..., tokens, key), v (..., tokens, value), log_keep, beta (..., tokens),
    state (..., key, value).
    """
    if state is None:
        state = v.new_zeros(*v.shape[:-2], k.shape[-1], v.shape[-1])
    if v.shape[-2] == 1:
        state = log_keep.exp()[..., None] * state
        state = state + k.mT * (beta[..., None] * (v - (k.mT * state).sum(-2, keepdim=True)))
        return (q.mT * state).sum(-2, keepdim=True), state
    parts = []
    pieces = [x.split(CHUNK, -2) for x in (q, k, v)] + [x.split(CHUNK, -1) for x in (log_keep, beta)]
    for qs, ks, vs, steps, rates in zip(*pieces, strict=True):
        total = steps.cumsum(-1)
        decay, kept = decays(total), total.exp()[..., None]
        pairs = ks @ ks.mT * decay * rates[..., None]
        wanted = rates[..., None] * (vs - kept * (ks @ state))
        u = torch.linalg.solve_triangular(pairs.tril(-1), wanted, upper=False, unitriangular=True)
        parts.append(kept * (qs @ state) + (qs @ ks.mT * decay) @ u)
        rest = (total[..., -1:] - total).exp()[..., None]
        state = kept[..., -1:, :] * state + (ks * rest).mT @ u
    return torch.cat(parts, -2), state


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    rate: Tensor,
    shift: Tensor,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`delta_rule` over whole sequences, with its operands (..., tokens, heads, size) and (..., tokens, heads): the
    outputs, and the state (..., heads, key, value) after them."""
    shared, size = v.shape[-2] // q.shape[-2], q.shape[-1]
    qs, ks = (_unit(part).repeat_interleave(shared, -2).transpose(-2, -3) for part in (q, k))
    log_keep = rate * torch.nn.functional.softplus(a + shift)
    y, h = delta_attention(qs * size**-0.5, ks, v.transpose(-2, -3), log_keep.mT, torch.sigmoid(b).mT, state)
    return y.transpose(-2, -3), h


def _delta_shape(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> Tensor:
    return v.new_empty(v.shape)


def _delta_cost(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    rate: Tensor,
    shift: Tensor,
    state: Tensor,
    meta: RecurrentMeta,
) -> Cost:
    read, write = moved_slots(state, meta)
    return Cost(7.0 * state[0].numel() * v.shape[0], nbytes(q, k, v, a, b, rate, shift) + read, nbytes(v) + write)


@op(cost=_delta_cost, shape=_delta_shape)
def delta_rule(
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
    """h = exp(rate softplus(a + shift)) h;  h = h + k (sigmoid(b) (v - k h))^T;  y = q h, per head of the values.

    q, k (tokens, key heads, key) are divided by their lengths, q also by sqrt(key). v (tokens, heads, value): each key
    head serves heads / key heads consecutive heads. a, b (tokens, heads), rate (heads,), at most 0, shift (heads,),
    state (slots, heads, key, value) in at least float32.
    """
    qs, ks, vs, keeps, betas, rates, shifts = (wide(part) for part in (q, k, v, a, b, rate, shift))
    return advance(
        torch.empty_like(v),
        (state,),
        meta,
        lambda at, h: gated_delta(qs[at], ks[at], vs[at], keeps[at], betas[at], rates, shifts, h),
    )
