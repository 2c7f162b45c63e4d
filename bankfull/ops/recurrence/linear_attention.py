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
from bankfull.ops.recurrence.ssm import RecurrentMeta, moved_slots
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
    out = torch.empty_like(v)
    qs, ks, vs, keep = wide(q), wide(k), wide(v), torch.exp(-wide(slopes))
    for i, kept in enumerate(meta.kept.tolist()):
        first, last = int(meta.q_start[i]), int(meta.q_start[i + 1])
        h = state.index_select(0, meta.read[i : i + 1])[0].to(qs.dtype)
        z = None if normalizer is None else normalizer.index_select(0, meta.read[i : i + 1])[0].to(qs.dtype)
        for t in range(first, last):
            h = keep[:, None, None] * h + ks[t][:, :, None] * vs[t][:, None, :]
            y = (qs[t][:, :, None] * h).sum(1)
            if z is not None:
                z = keep[:, None] * z + ks[t]
                y = y / (qs[t] * z).sum(-1, keepdim=True)
            out[t] = y.to(v.dtype)
            j = kept - (last - t)
            if j >= 0:
                state.index_copy_(0, meta.write[i, j : j + 1], h[None].to(state.dtype))
                if z is not None and normalizer is not None:
                    normalizer.index_copy_(0, meta.write[i, j : j + 1], z[None].to(normalizer.dtype))
    return out
