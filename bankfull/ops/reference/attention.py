"""Attention over a paged KV cache: one variable-length path for prefill, chunks, decoding and draft verification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from bankfull.ops.cost import Cost, nbytes
from bankfull.ops.reference.norm import rms_norm
from bankfull.ops.reference.rope import rotate
from bankfull.ops.registry import op

TREE_TOKENS = 64
"""Most new tokens of a sequence whose drafts are a tree: the bits of a mask."""


class SequencePartition(Protocol):
    """Assigns the sequences of a captured prefill step to kernels. `starts` is known only on the device, so the
    assignment is computed there."""

    decodes: Tensor | None
    """Sequences with one new token, padded with an empty sequence; None if steps of this kind have none."""

    def tiles(self, tokens: int) -> Tensor:
        """The other sequences in tiles of `tokens` query tokens, in the format of `attention_map.tile_map`."""
        ...


@dataclass(frozen=True, slots=True)
class PagedMeta:
    """Location of the step's sequences in the KV pages of one group. Integers are host arrays; tensors are on the
    device.

    Sequence i owns the queries q_start[i] .. q_start[i+1], the last ones of its kv_len[i] tokens (right-aligned causal
    mask). `pages[i]` is its page table; `slots[t]` is the KV slot (page * page_tokens + offset) of new token t.

    If the new tokens of a sequence are a tree of drafts, each of them sees the tokens before the step, its ancestors
    and itself. Its position is that of the path to it, not that of its KV slot.
    """

    q_start: np.ndarray
    kv_len: np.ndarray
    pages: Tensor
    slots: Tensor
    page_tokens: int
    starts: Tensor | None = None
    """q_start as int32 on the device, for device kernels."""
    lengths: Tensor | None = None
    """kv_len as int32 on the device. Captured steps read only this one: their host arrays are those of the capture."""
    partition: SequencePartition | None = None
    """Set in captured steps whose sequences have varying numbers of new tokens."""
    ancestors: Tensor | None = None
    """(tokens) int64 bit masks, if any sequence has a tree: bit j is set if the sequence's new token j is visible to
    this one. Parents come before their children, so the set bits are the path to the token, in order. 0 in sequences
    without a tree. A tree has at most `TREE_TOKENS` tokens."""


def _write_cost(new: Tensor, pages: Tensor, slots: Tensor) -> Cost:
    return Cost(0.0, nbytes(new, slots), new.numel() * pages.element_size())


@op(cost=_write_cost, shape=lambda new, pages, slots: None)
def write_pages(new: Tensor, pages: Tensor, slots: Tensor) -> None:
    """Store new (tokens, ...) into pages (frames, page_tokens, ...) at the flat KV slots."""
    page_tokens = pages.shape[1]
    pages[slots // page_tokens, slots % page_tokens] = new.to(pages.dtype)


LEVELS = 127
"""Largest magnitude of an int8 KV code."""


def _write_int8_cost(new: Tensor, pages: Tensor, scales: Tensor, slots: Tensor) -> Cost:
    written = new.numel() * pages.element_size() + new.numel() // new.shape[-1] * scales.element_size()
    return Cost(3.0 * new.numel(), nbytes(new, slots), written)


@op(cost=_write_int8_cost, shape=lambda new, pages, scales, slots: None)
def write_pages_int8(new: Tensor, pages: Tensor, scales: Tensor, slots: Tensor) -> None:
    """`write_pages` with quantization: pages (frames, page_tokens, heads, size) hold int8 codes, scales (frames,
    page_tokens, heads) one float32 scale per token and head. Non-finite inputs produce a non-finite scale."""
    numbers = new.to(torch.float32)
    scale = numbers.abs().amax(-1) / LEVELS
    codes = (numbers / scale.unsqueeze(-1)).nan_to_num(0.0).round().clamp(-LEVELS, LEVELS)
    page_tokens = pages.shape[1]
    page, offset = slots // page_tokens, slots % page_tokens
    pages[page, offset] = codes.to(torch.int8)
    scales[page, offset] = scale


def visible_pairs(queries: int, length: int, window: int | None) -> int:
    """Query-key pairs left by a causal mask (with an optional window) for the last `queries` of `length` tokens."""
    past = length - queries
    whole = queries if window is None else min(max(window - past, 0), queries)  # whose window covers the past
    return whole * past + whole * (whole + 1) // 2 + (queries - whole) * (window or 0)


def live_from(queries: int, length: int, window: int | None) -> int:
    """First position visible to any of the last `queries` tokens."""
    return 0 if window is None else max(0, length - queries + 1 - window)


def _attention_cost(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    meta: PagedMeta,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Cost:
    heads, size = q.shape[1], q.shape[2]
    token_bytes = sum(nbytes(part[0, 0]) for part in (k_pages, v_pages, k_scales, v_scales) if part is not None)
    pairs = live = 0  # of a tree: the pairs of a chain with as many tokens, since masks may be on a device
    for queries, length in zip(np.diff(meta.q_start), meta.kv_len, strict=True):
        pairs += visible_pairs(int(queries), int(length), window)
        live += int(length) - live_from(int(queries), int(length), window)
    out = q.shape[0] * heads * v_pages.shape[-1] * q.element_size()
    return Cost(2.0 * pairs * heads * (size + v_pages.shape[-1]), nbytes(q) + live * token_bytes, out)


def _attention_shape(q: Tensor, k_pages: Tensor, v_pages: Tensor, *rest: object, **more: object) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v_pages.shape[-1])


def _numbers(pages: Tensor, scales: Tensor | None, table: Tensor, dtype: torch.dtype) -> Tensor:
    """The dequantized tokens of the pages in `table`, concatenated."""
    numbers = pages[table].flatten(0, 1).to(dtype)
    return numbers if scales is None else numbers * scales[table].flatten(0, 1).to(dtype).unsqueeze(-1)


def _in_tree(ancestors: Tensor, past: int, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Positions of a tree's tokens (as queries) and of the keys at the indices `key`, and the pairs that are hidden."""
    bits = torch.arange(len(ancestors), device=ancestors.device)
    sees = (ancestors[:, None] >> bits & 1).bool()
    at = past + sees.sum(1) - 1
    inside = (key[0] - past).clamp_min(0)
    hidden = (key >= past) & ~sees[:, inside]
    return at[:, None], torch.where(key < past, key, at[inside]), hidden


@op(cost=_attention_cost, shape=_attention_shape)
def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    meta: PagedMeta,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Tensor:
    """softmax(cap(q k^T * scale) + mask) v for queries (tokens, heads, size); query head i reads KV head i * K // N.

    Pages may have another dtype than queries; int8 pages need the scales written by `write_pages_int8`.
    Sequences are computed one by one, so a result never depends on the batch, and only live pages are read.
    """
    page = meta.page_tokens
    exact = torch.promote_types(torch.promote_types(q.dtype, k_pages.dtype), torch.float32)
    out = q.new_empty(q.shape[0], q.shape[1], v_pages.shape[-1])
    for i, length in enumerate(meta.kv_len.tolist()):
        first, last = int(meta.q_start[i]), int(meta.q_start[i + 1])
        queries = last - first
        begin = live_from(queries, length, window) // page
        table = meta.pages[i, begin : -(-length // page)].long()
        k, v = (
            _numbers(pages, scales, table, exact)[: length - begin * page]
            for pages, scales in ((k_pages, k_scales), (v_pages, v_scales))
        )
        groups = q.shape[1] // k.shape[1]
        # (K, groups, queries, size) x (K, size, keys): query heads of one KV head are batched, keys are never repeated.
        grouped = q[first:last].to(exact).unflatten(1, (k.shape[1], groups)).permute(1, 2, 0, 3)
        scores = torch.matmul(grouped, k.permute(1, 2, 0)[:, None]) * scale
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        at = torch.arange(length - queries, length, device=q.device)[:, None]
        key = torch.arange(begin * page, length, device=q.device)[None, :]
        hidden = key > at
        if meta.ancestors is not None and int(meta.ancestors[first]):
            at, key, hidden = _in_tree(meta.ancestors[first:last], length - queries, key)
        if window is not None:
            hidden = hidden | (key <= at - window)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        mixed = torch.matmul(weights, v.permute(1, 0, 2)[:, None])
        out[first:last] = mixed.permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)
    return out


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms over each head of the queries and keys, applied before RoPE."""

    q: Tensor
    k: Tensor
    eps: float
    offset: float = 0.0


def _attend_cost(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    meta: PagedMeta,
    angles: tuple[Tensor, Tensor] | None,
    norms: HeadNorms | None,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
) -> Cost:
    """New keys and values are counted as read once, not a second time from their pages."""
    cost = _attention_cost(q, k_pages, v_pages, meta, scale, window, cap)
    flops = 0.0
    for x in (q, k):
        flops += 0.0 if norms is None else 4.0 * x.numel()
        flops += 0.0 if angles is None else 6.0 * x.shape[0] * x.shape[1] * angles[0].shape[1]
    small = nbytes(meta.slots, *(angles or ()), *((norms.q, norms.k) if norms else ()))
    return cost + Cost(flops, small, k.numel() * k_pages.element_size() + v.numel() * v_pages.element_size())


@op(cost=_attend_cost, shape=_attention_shape)
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    meta: PagedMeta,
    angles: tuple[Tensor, Tensor] | None,
    norms: HeadNorms | None,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
) -> Tensor:
    """Everything between the projections of an attention layer: norm and RoPE of queries and keys, KV page writes, and
    attention. Layers use it where a provider has it as one fused kernel."""
    if norms is not None:
        q, k = (rms_norm.body(x, own, norms.eps, norms.offset) for x, own in ((q, norms.q), (k, norms.k)))
    if angles is not None:
        q, k = rotate.body(q, *angles), rotate.body(k, *angles)
    write_pages.body(k, k_pages, meta.slots)
    write_pages.body(v, v_pages, meta.slots)
    return paged_attention.body(q, k_pages, v_pages, meta, scale, window, cap)
