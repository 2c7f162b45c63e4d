"""The gated delta rule: a matrix per head that forgets, and replaces what it holds for a key by the key's new value."""

from __future__ import annotations

import torch
from torch import Tensor

from bankfull.ops.cost import Cost, nbytes
from bankfull.ops.norm.body import wide
from bankfull.ops.recurrence.ssm import RecurrentMeta, moved_slots
from bankfull.ops.registry import op

UNIT_EPS = 1e-6
"""Added to the squared length of queries and keys before they are divided by it."""


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPS)


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
    out = torch.empty_like(v)
    shared, size = v.shape[1] // q.shape[1], q.shape[2]
    qs, ks = (_unit(wide(x)).repeat_interleave(shared, 1) for x in (q, k))
    qs, vs, beta = qs * size**-0.5, wide(v), torch.sigmoid(wide(b))
    keep = torch.exp(wide(rate) * torch.nn.functional.softplus(wide(a) + wide(shift)))
    for i, kept in enumerate(meta.kept.tolist()):
        first, last = int(meta.q_start[i]), int(meta.q_start[i + 1])
        h = state.index_select(0, meta.read[i : i + 1])[0].to(qs.dtype)
        for t in range(first, last):
            h = keep[t][:, None, None] * h
            error = vs[t] - (ks[t][:, :, None] * h).sum(1)
            h = h + ks[t][:, :, None] * (beta[t][:, None] * error)[:, None, :]
            out[t] = (qs[t][:, :, None] * h).sum(1).to(v.dtype)
            j = kept - (last - t)
            if j >= 0:
                state.index_copy_(0, meta.write[i, j : j + 1], h[None].to(state.dtype))
    return out
