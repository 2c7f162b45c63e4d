"""Independent definitions of the operations of latent attention: numpy, float64, one token and head at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bankfull.ops import HeadWeights, PagedMeta
from tests.ops import oracles


def head_products(x: Tensor, weight: HeadWeights) -> np.ndarray:
    rows, stored = oracles.f64(x), oracles.f64(weight.stored.dequantize(x.dtype))
    out = np.zeros((*rows.shape[:2], weight.outputs))
    for token, head in np.ndindex(*rows.shape[:2]):
        matrix = stored[head].T if weight.across else stored[head]
        out[token, head] = matrix @ rows[token, head]
    return out


def absorb_queries(q: Tensor, cos: Tensor, sin: Tensor, weight: HeadWeights) -> np.ndarray:
    plain, turned = q[..., : weight.columns], q[..., weight.columns :]
    return np.concatenate((head_products(plain, weight), oracles.rotate(turned, cos, sin)), -1)


def write_latents(
    kv: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, pages: Tensor, slots: Tensor
) -> np.ndarray:
    rank, kept, page = len(weight), oracles.f64(pages), pages.shape[1]
    latents, keys = oracles.rms_norm(kv[:, :rank], weight, eps), oracles.rotate(kv[:, None, rank:], cos, sin)[:, 0]
    for token, slot in enumerate(slots.tolist()):
        kept[slot // page, slot % page, 0] = np.concatenate((latents[token], keys[token]))
    return kept


def latent_attention(
    q: Tensor, pages: Tensor, rank: int, meta: PagedMeta, scale: float, window: int | None = None
) -> np.ndarray:
    return oracles.paged_attention(q, pages, pages[..., :rank].clone(), meta, scale, window)


def expanded_attention(
    q: Tensor,
    cos: Tensor,
    sin: Tensor,
    pages: Tensor,
    meta: PagedMeta,
    keys: HeadWeights,
    values: HeadWeights,
    scale: float,
    window: int | None = None,
) -> np.ndarray:
    """Keys and values of every head for every place of every page."""
    frames, page, _, width = pages.shape
    rank, nope = keys.columns, keys.outputs
    precise = torch.promote_types(torch.promote_types(q.dtype, pages.dtype), torch.float32)
    rows = oracles.f64(pages).reshape(-1, width)
    k, v = (np.zeros((len(rows), keys.heads, size)) for size in (nope + width - rank, values.outputs))
    for head in range(keys.heads):
        up, out = (oracles.f64(weight.matrices(precise)[head]) for weight in (keys, values))
        k[:, head] = np.concatenate((rows[:, :rank] @ up, rows[:, rank:]), -1)
        v[:, head] = rows[:, :rank] @ out
    query = np.concatenate((oracles.f64(q[..., :nope]), oracles.rotate(q[..., nope:], cos, sin)), -1)
    k_pages, v_pages = (torch.from_numpy(part).unflatten(0, (frames, page)) for part in (k, v))
    return oracles.paged_attention(torch.from_numpy(query), k_pages, v_pages, meta, scale, window)


ORACLES: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (head_products, absorb_queries, write_latents, latent_attention, expanded_attention)
}
