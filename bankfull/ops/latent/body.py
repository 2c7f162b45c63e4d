"""Multi-head latent attention: the KV cache holds one latent and one RoPE key per token for all heads.

A token's row of a page is its normed latent (`rank` numbers) and its rotated key (`rope` numbers). Keys and values of
head i are products with the latent: k_i = [U_i c ; r], v_i = V_i c. There are two ways to attend, with equal results:

- absorbed: queries are multiplied by U_i once, so they meet the latents themselves. All heads share each row, which is
  read once, and the value is the row's first `rank` columns. It costs more FLOPs per pair of query and key.
- expanded: keys and values are computed from the latents of the whole context, then attention runs as usual. It pays
  if many new tokens share the expansion.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from bankfull.ops.attention.body import PagedMeta, page_operands, paged_attention, write_pages
from bankfull.ops.attention.sight import live_from, visible_pairs
from bankfull.ops.cost import Cost, nbytes
from bankfull.ops.norm.body import rms_norm, wide
from bankfull.ops.registry import op
from bankfull.ops.rope.body import rotate
from bankfull.weights.qtensor import QTensor


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """One matrix per head: (heads, outputs, columns), or (heads, columns, outputs) if `across`."""

    stored: QTensor
    across: bool = False

    @property
    def heads(self) -> int:
        return self.stored.shape[0]

    @property
    def outputs(self) -> int:
        return self.stored.shape[2 if self.across else 1]

    @property
    def columns(self) -> int:
        return self.stored.shape[1 if self.across else 2]

    @property
    def nbytes(self) -> int:
        return self.stored.nbytes

    def matrices(self, dtype: torch.dtype) -> Tensor:
        """(heads, columns, outputs), a view where possible."""
        dense = self.stored.dequantize(dtype)
        return dense if self.across else dense.transpose(1, 2)

    def reversed(self) -> HeadWeights:
        """The transposed matrices, with the same memory."""
        return replace(self, across=not self.across)


def _product_cost(x: Tensor, weight: HeadWeights) -> Cost:
    tokens, heads, columns = x.shape
    out = tokens * heads * weight.outputs
    return Cost(2.0 * out * columns, nbytes(x, weight), out * x.element_size())


def _product_shape(x: Tensor, weight: HeadWeights) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1], weight.outputs)


@op(cost=_product_cost, shape=_product_shape)
def head_products(x: Tensor, weight: HeadWeights) -> Tensor:
    """Each head's vectors (tokens, heads, columns) times the head's own matrix: (tokens, heads, outputs)."""
    rows = wide(x).transpose(0, 1)
    return torch.matmul(rows, weight.matrices(rows.dtype)).transpose(0, 1).to(x.dtype).contiguous()


def _absorb_cost(q: Tensor, cos: Tensor, sin: Tensor, weight: HeadWeights) -> Cost:
    tokens, heads, size = q.shape
    product = 2.0 * tokens * heads * weight.outputs * weight.columns
    out = tokens * heads * (weight.outputs + size - weight.columns)
    turned = 3.0 * tokens * heads * (size - weight.columns)
    return Cost(product + turned, nbytes(q, weight, cos, sin), out * q.element_size())


def _absorb_shape(q: Tensor, cos: Tensor, sin: Tensor, weight: HeadWeights) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], weight.outputs + q.shape[2] - weight.columns)


@op(cost=_absorb_cost, shape=_absorb_shape)
def absorb_queries(q: Tensor, cos: Tensor, sin: Tensor, weight: HeadWeights) -> Tensor:
    """Queries (tokens, heads, columns + rope) for latents: the first part times the head's matrix, the last one
    rotated (RoPE with half-split pairing)."""
    plain, turned = q[..., : weight.columns], q[..., weight.columns :]
    return torch.cat((head_products.body(plain, weight), rotate.body(turned, cos, sin)), -1)


def _write_cost(kv: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, pages: Tensor, slots: Tensor) -> Cost:
    flops = 4.0 * kv.shape[0] * weight.shape[0] + 3.0 * kv.shape[0] * (kv.shape[1] - weight.shape[0])
    return Cost(flops, nbytes(kv, weight, slots, cos, sin), kv.numel() * pages.element_size())


@op(cost=_write_cost, shape=lambda kv, weight, eps, cos, sin, pages, slots: None)
def write_latents(
    kv: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, pages: Tensor, slots: Tensor
) -> None:
    """Store the new tokens' rows kv (tokens, rank + rope) in pages (frames, page_tokens, 1, rank + rope): the RMS norm
    of the latent, whose weight has `rank` numbers, and the rotated key."""
    write_pages.body(latent_rows(kv, weight, eps, cos, sin), pages, slots)


def latent_rows(kv: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """(tokens, 1, rank + rope) what `write_latents` stores."""
    rank = weight.shape[0]
    latent = rms_norm.body(kv[:, :rank], weight, eps)
    key = rotate.body(kv[:, None, rank:], cos, sin)
    return torch.cat((latent[:, None], key), -1)


def _latent_cost(q: Tensor, pages: Tensor, rank: int, meta: PagedMeta, scale: float, window: int | None = None) -> Cost:
    """Each row of the cache is read once for all heads."""
    tokens, heads, size = q.shape
    pairs, live = _pairs_and_live(meta, window)
    read = nbytes(q) + live * size * pages.element_size()
    cost = Cost(2.0 * pairs * heads * (size + rank), read, tokens * heads * rank * q.element_size())
    return cost.on(page_operands(q, pages))


def _pairs_and_live(meta: PagedMeta, window: int | None) -> tuple[int, int]:
    pairs = live = 0
    for queries, length in zip(np.diff(meta.q_start).tolist(), meta.kv_len.tolist(), strict=True):
        pairs += visible_pairs(queries, length, window)
        live += length - live_from(queries, length, window)
    return pairs, live


@op(cost=_latent_cost, shape=lambda q, pages, rank, *rest, **more: q.new_empty(*q.shape[:2], rank))
def latent_attention(
    q: Tensor, pages: Tensor, rank: int, meta: PagedMeta, scale: float, window: int | None = None
) -> Tensor:
    """Attention of absorbed queries (tokens, heads, rank + rope) over pages (frames, page_tokens, 1, rank + rope). The
    value of a key is its first `rank` columns. Masks, windows and trees as in `paged_attention`."""
    return paged_attention.body(q, pages, pages[..., :rank], meta, scale, window)


def _expanded_cost(
    q: Tensor,
    cos: Tensor,
    sin: Tensor,
    pages: Tensor,
    meta: PagedMeta,
    keys: HeadWeights,
    values: HeadWeights,
    scale: float,
    window: int | None = None,
) -> Cost:
    tokens, heads, size = q.shape
    pairs, live = _pairs_and_live(meta, window)
    flops = 2.0 * pairs * heads * (size + values.outputs)
    flops += 2.0 * live * heads * (keys.outputs * keys.columns + values.outputs * values.columns)
    flops += 3.0 * tokens * heads * (size - keys.outputs)
    read = nbytes(q, keys, values, cos, sin) + live * pages.shape[-1] * pages.element_size()
    return Cost(flops, read, tokens * heads * values.outputs * q.element_size()).on(page_operands(q, pages))


@op(
    cost=_expanded_cost,
    shape=lambda q, cos, sin, pages, meta, keys, values, *rest, **more: q.new_empty(*q.shape[:2], values.outputs),
)
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
) -> Tensor:
    """Attention of plain queries (tokens, heads, nope + rope) over keys and values that are expanded from the latents
    in the pages: (tokens, heads, values). `keys` and `values` turn a latent into a head's key and value."""
    q = turned_queries(q, cos, sin, keys)
    exact = torch.promote_types(torch.promote_types(q.dtype, pages.dtype), torch.float32)
    parts = []
    for i in range(len(meta.kv_len)):
        queries = slice(int(meta.q_start[i]), int(meta.q_start[i + 1]))
        k, v = expanded_rows(pages, meta, i, keys, values, window, exact)
        parts.append(
            paged_attention.body(q[queries], k[None], v[None], sequence_meta(meta, queries, len(k)), scale, window)
        )
    return torch.cat(parts) if parts else q.new_empty(0, q.shape[1], values.outputs)


def turned_queries(q: Tensor, cos: Tensor, sin: Tensor, keys: HeadWeights) -> Tensor:
    """Queries (tokens, heads, nope + rope) for expanded keys: the last numbers rotated."""
    return torch.cat((q[..., : keys.outputs], rotate.body(q[..., keys.outputs :], cos, sin)), -1)


def expanded_rows(
    pages: Tensor,
    meta: PagedMeta,
    sequence: int,
    keys: HeadWeights,
    values: HeadWeights,
    window: int | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Keys (length, heads, nope + rope) and values (length, heads, values) of the positions that any new token of the
    sequence sees, in order; the last one is the sequence's last."""
    page, length = meta.page_tokens, int(meta.kv_len[sequence])
    queries = int(meta.q_start[sequence + 1] - meta.q_start[sequence])
    first = live_from(queries, length, window)
    table = meta.pages[sequence, first // page : -(-length // page)].long()
    at = first - first // page * page
    rows = pages[table].flatten(0, 1)[at : at + length - first, 0].to(dtype)
    rank = keys.columns
    plain = torch.matmul(rows[:, :rank], keys.matrices(dtype)).transpose(0, 1)
    turned = rows[:, None, rank:].expand(-1, keys.heads, -1)
    return torch.cat((plain, turned), -1), torch.matmul(rows[:, :rank], values.matrices(dtype)).transpose(0, 1)


def sequence_meta(meta: PagedMeta, own: slice, length: int) -> PagedMeta:
    """One sequence over contiguous rows of its last `length` positions, as one page."""
    device = meta.pages.device
    return PagedMeta(
        np.array([0, own.stop - own.start]),
        np.array([length]),
        torch.zeros(1, 1, dtype=torch.int64, device=device),
        meta.slots[own],
        length,
        ancestors=None if meta.ancestors is None else meta.ancestors[own],
    )


EXPAND_FROM = 64
"""Fewest new tokens of a sequence for which keys and values are expanded: a tile of queries."""


def expansion_pays(new: int, length: int, rank: int, expanded: int) -> bool:
    """Whether expansion takes fewer FLOPs than absorption for `new` tokens at the end of `length`. `expanded`: numbers
    of a head's key without RoPE and of its value."""
    if new < EXPAND_FROM:
        return False
    saved = visible_pairs(new, length, None) * (2 * rank - expanded) + new * rank * expanded
    return length * rank * expanded < saved
