"""Independent definitions of partial attention, of its merge, and of the exchange of parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bankfull.ops import PagedMeta
from tests.ops.oracles import Array, f64, held


def exchange_parts(x: Tensor, group: Any) -> Array:
    """The other ranks hold equal parts."""
    return np.stack([f64(x)[group.index]] * group.size)


def partial_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor | int,
    meta: PagedMeta,
    ranks: int,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Array:
    """A dense softmax over exactly the visible keys that are here."""
    queries, keys = f64(q), held(k_pages, k_scales)
    values = keys[..., :v_pages] if isinstance(v_pages, int) else held(v_pages, v_scales)
    per_key = q.shape[1] // k_pages.shape[2]
    out = np.zeros((*q.shape[:2], values.shape[-1] + 1))
    for i, length in enumerate(meta.kv_len.tolist()):
        first, last = meta.q_start[i : i + 2].tolist()
        for t in range(first, last):
            mask = 0 if meta.ancestors is None else int(meta.ancestors[t])
            path = [j for j in range(last - first) if mask >> j & 1] or range(t - first + 1)
            order = [*range(length - (last - first)), *(length - (last - first) + j for j in path)]
            seen = order[0 if window is None else max(0, len(order) - window) :]
            places = [(int(meta.pages[i, p // meta.page_tokens]), p % meta.page_tokens) for p in seen]
            places = [(page, offset) for page, offset in places if page >= 0]
            for h in range(q.shape[1]):
                scores = np.array([queries[t, h] @ keys[page, o, h // per_key] for page, o in places]) * scale
                if cap is not None:
                    scores = cap * np.tanh(scores / cap)
                total = scores.max() + np.log(np.exp(scores - scores.max()).sum())
                weights = np.exp(scores - total)
                mixed = sum(w * values[page, o, h // per_key] for w, (page, o) in zip(weights, places, strict=True))
                out[t, h] = [*np.atleast_1d(mixed), total]
    return out


def merge_partials(parts: Tensor, dtype: torch.dtype, sinks: Tensor | None = None) -> Array:
    """The definition: sums of values and of weights over all keys."""
    mixed, weights = f64(parts[..., :-1]), np.exp(f64(parts[..., -1]))[..., None]
    total = weights.sum(0) + (0.0 if sinks is None else np.exp(f64(sinks))[:, None])
    return np.asarray((mixed * weights).sum(0) / total)


ORACLES: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (exchange_parts, partial_attention, merge_partials)
}
