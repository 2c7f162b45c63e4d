"""Independent definitions of linear attention and the delta rule: sums over all earlier tokens, no recurrence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy
from torch import Tensor

from bankfull.ops import RecurrentMeta
from tests.ops.oracles import Array, f64


def taylor_features(x: Tensor) -> Array:
    values = f64(x)
    size = values.shape[-1]
    out = np.ones((*values.shape[:-1], 1 + size + size * size))
    for i in range(size):
        out[..., 1 + i] = values[..., i] / size**0.25
        for j in range(size):
            out[..., 1 + size + i * size + j] = values[..., i] * values[..., j] / np.sqrt(2 * size)
    return out


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, state: Tensor, normalizer: Tensor | None, meta: RecurrentMeta
) -> tuple[Array, ...]:
    """Each token is a weighted sum over the tokens before it; the state is the sum of their products."""
    qs, ks, vs, slope = f64(q), f64(k), f64(v), f64(slopes)
    before, after, out = f64(state), f64(state), np.zeros(v.shape)
    sums, sums_after = (None, None) if normalizer is None else (f64(normalizer), f64(normalizer))
    for i, kept in enumerate(meta.kept.tolist()):
        first, last = meta.q_start[i : i + 2].tolist()
        slot = int(meta.read[i])
        for head in range(qs.shape[1]):
            for t in range(first, last):
                passed = np.exp(-slope[head] * (t + 1 - first))
                weights = np.exp(-slope[head] * (t - np.arange(first, t + 1)))
                products = sum(
                    w * np.outer(ks[s, head], vs[s, head]) for w, s in zip(weights, range(first, t + 1), strict=True)
                )
                matrix = passed * before[slot, head] + products
                out[t, head] = qs[t, head] @ matrix
                if last - t <= kept:
                    after[int(meta.write[i, kept - (last - t)]), head] = matrix
                if sums is not None and sums_after is not None:
                    line = passed * sums[slot, head] + weights @ ks[first : t + 1, head]
                    out[t, head] /= qs[t, head] @ line
                    if last - t <= kept:
                        sums_after[int(meta.write[i, kept - (last - t)]), head] = line
    return (out, after) if sums_after is None else (out, after, sums_after)


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
) -> tuple[Array, Array]:
    """h = keep (I - beta k k^T) h + beta k v^T, written out as products of matrices."""
    qs, ks, vs, gates, betas = f64(q), f64(k), f64(v), f64(a), scipy.special.expit(f64(b))
    before, after, out = f64(state), f64(state), np.zeros(v.shape)
    shared, size = vs.shape[1] // qs.shape[1], qs.shape[2]
    for i, kept in enumerate(meta.kept.tolist()):
        first, last = meta.q_start[i : i + 2].tolist()
        for head in range(vs.shape[1]):
            h = before[int(meta.read[i]), head]
            for t in range(first, last):
                key, query = ks[t, head // shared], qs[t, head // shared]
                key = key / np.sqrt(key @ key + 1e-6)
                query = query / np.sqrt(query @ query + 1e-6) / np.sqrt(size)
                keep = np.exp(f64(rate)[head] * np.logaddexp(gates[t, head] + f64(shift)[head], 0))
                forget = np.eye(size) - betas[t, head] * np.outer(key, key)
                h = forget @ (keep * h) + betas[t, head] * np.outer(key, vs[t, head])
                out[t, head] = query @ h
                if last - t <= kept:
                    after[int(meta.write[i, kept - (last - t)]), head] = h
    return out, after


ORACLES: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (taylor_features, linear_attention, delta_rule)
}
