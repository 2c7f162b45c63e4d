"""Linear attention: a matrix per head that decays and adds one product of key and value per token.

A token reads the matrix with its query, so a sequence costs the same at any length. Lightning attention has a fixed
decay per head; BASED has none, maps queries and keys to the features of a second-order Taylor expansion of exp, and
divides by a normalizer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bankfull.ops.cost import Cost, nbytes
from bankfull.ops.norm.body import wide
from bankfull.ops.recurrence.ssm import CHUNK, RecurrentMeta, advance, moved_slots
from bankfull.ops.registry import op


def taylor_size(size: int) -> int:
    """Features of a query or key with `size` elements."""
    return 1 + size + size * size


def _taylor_shape(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], taylor_size(x.shape[-1]))


def _taylor_cost(x: Tensor) -> Cost:
    rows, size = x.numel() / max(1, x.shape[-1]), x.shape[-1]
    return Cost(rows * (size + 2.0 * size * size), nbytes(x), rows * taylor_size(size) * x.element_size())


@op(cost=_taylor_cost, shape=_taylor_shape)
def taylor_features(x: Tensor) -> Tensor:
    """[1, x / d^(1/4), vec(x x^T) / sqrt(2 d)] over the last dimension: the product of two results is the second-order
    Taylor expansion of exp(q k / sqrt(d))."""
    y, size = wide(x), x.shape[-1]
    pairs = (y[..., :, None] * y[..., None, :]).flatten(-2) * (2 * size) ** -0.5
    return torch.cat((torch.ones_like(y[..., :1]), y * size**-0.25, pairs), -1).to(x.dtype)


def decays(total: Tensor) -> Tensor:
    """(..., tokens, tokens) exp(total[t] - total[j]) for j <= t, 0 elsewhere; `total` never rises."""
    differences = total[..., :, None] - total[..., None, :]
    future = torch.ones(differences.shape[-2:], dtype=torch.bool, device=total.device).triu(1)
    return differences.masked_fill(future, -torch.inf).exp()


def decayed_attention(
    q: Tensor, k: Tensor, v: Tensor, log_keep: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """h = exp(log_keep) h + k v^T;  y = q h: the outputs, and the state after them.

    y[t] is also the sum over j <= t of exp(log_keep[j + 1] + ... + log_keep[t]) (q[t] k[j]) v[j], which computes the
    pairs within a chunk at once. q, k (..., tokens, key), v (..., tokens, value), log_keep (..., tokens), at most 0,
    state (..., key, value).
    """
    if state is None:
        state = v.new_zeros(*v.shape[:-2], k.shape[-1], v.shape[-1])
    if v.shape[-2] == 1:
        state = log_keep.exp()[..., None] * state + k.mT * v
        return (q.mT * state).sum(-2, keepdim=True), state
    parts = []
    for qs, ks, vs, steps in zip(*(x.split(CHUNK, -2) for x in (q, k, v)), log_keep.split(CHUNK, -1), strict=True):
        total = steps.cumsum(-1)
        parts.append((qs @ ks.mT * decays(total)) @ vs + total.exp()[..., None] * (qs @ state))
        rest = (total[..., -1:] - total).exp()[..., None]
        state = total[..., -1:, None].exp() * state + (ks * rest).mT @ vs
    return torch.cat(parts, -2), state


def normalized(y: Tensor) -> Tensor:
    """y (..., value + 1) without its last column, divided by it: that column is q z with z = keep z + k, the result of
    linear attention for values of one."""
    return y[..., :-1] / y[..., -1:]


def with_ones(v: Tensor) -> Tensor:
    return torch.cat((v, torch.ones_like(v[..., :1])), -1)


def _values_shape(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> Tensor:
    return v.new_empty(v.shape)


def _linear_attention_cost(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, state: Tensor, normalizer: Tensor | None, meta: RecurrentMeta
) -> Cost:
    read, write = moved_slots(state, meta)
    per_token = 5.0 * state[0].numel()
    if normalizer is not None:
        more = moved_slots(normalizer, meta)
        read, write, per_token = read + more[0], write + more[1], per_token + 4.0 * normalizer[0].numel()
    return Cost(per_token * v.shape[0], nbytes(q, k, v, slopes) + read, nbytes(v) + write)


@op(cost=_linear_attention_cost, shape=_values_shape)
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, state: Tensor, normalizer: Tensor | None, meta: RecurrentMeta
) -> Tensor:
    """h = exp(-slope) h + k v^T;  y = q h, per head; with a normalizer z = exp(-slope) z + k;  y = q h / (q z).

    q, k (tokens, heads, key), v (tokens, heads, value), slopes (heads,), state (slots, heads, key, value), normalizer
    (slots, heads, key), both in at least float32.
    """
    qs, ks, vs = (wide(part).transpose(0, 1) for part in (q, k, v))
    log_keep = -wide(slopes)[:, None].expand(-1, len(v))

    def run(at: slice, h: Tensor, z: Tensor | None = None) -> tuple[Tensor, ...]:
        part = qs[:, at], ks[:, at]
        if z is None:
            y, h = decayed_attention(*part, vs[:, at], log_keep[:, at], h)
            return y.transpose(0, 1), h
        y, h = decayed_attention(*part, with_ones(vs[:, at]), log_keep[:, at], torch.cat((h, z[..., None]), -1))
        return normalized(y).transpose(0, 1), h[..., :-1], h[..., -1]

    return advance(torch.empty_like(v), (state,) if normalizer is None else (state, normalizer), meta, run)
