"""Attention over a paged KV cache: one variable-length path for prefill, chunks, decoding and draft verification."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from bankfull.ops.attention.sight import live_from, live_pages, live_tokens, visible_pairs
from bankfull.ops.cost import Cost, Operands, nbytes
from bankfull.ops.norm.body import rms_norm
from bankfull.ops.pages.rounded import head_numbers, is_rounded, page_numbers
from bankfull.ops.registry import op
from bankfull.ops.rope.body import rotate
from bankfull.state.mask import Mask, Sight

TREE_TOKENS = 64
"""Most new tokens of a sequence whose drafts are a tree: the bits of a mask."""
WHOLE_SEQUENCE = 1 << 30
"""`PagedMeta.block` of a model whose tokens see the whole sequence."""


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
    block: int = 0
    """Tokens of a block, aligned to position 0, that see each other in both directions, and all blocks before. 0 =
    causal: a token sees itself and those before it. Not together with a window or a tree."""
    derived: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What a provider has derived from this meta, for the next layers of the step."""


def _write_cost(new: Tensor, pages: Tensor, slots: Tensor) -> Cost:
    return Cost(0.0, nbytes(new, slots), new.numel() * pages.element_size())


@op(cost=_write_cost, shape=lambda new, pages, slots: None)
def write_pages(new: Tensor, pages: Tensor, slots: Tensor) -> None:
    """Store new (tokens, ...) into pages (frames, page_tokens, ...) at the flat KV slots."""
    page_tokens = pages.shape[1]
    pages[slots // page_tokens, slots % page_tokens] = new.to(pages.dtype)


def page_operands(q: Tensor, pages: Tensor) -> Operands:
    """Operands of attention's products: over pages in fewer bits, a float32 computation may round queries and softmax
    weights to bfloat16."""
    return "bf16" if q.dtype is torch.float32 and pages.dtype is not torch.float32 else "own"


def _attention_cost(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    meta: PagedMeta,
    scale: float,
    window: Sight = None,
    cap: float | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Cost:
    heads, size = q.shape[1], q.shape[2]
    token_bytes = sum(nbytes(part[0, 0]) for part in (k_pages, v_pages, k_scales, v_scales) if part is not None)
    pairs = live = 0  # of a tree: the pairs of a chain with as many tokens, since masks may be on a device
    for queries, length in zip(np.diff(meta.q_start), meta.kv_len, strict=True):
        pairs += visible_pairs(int(queries), int(length), window, meta.block)
        live += live_tokens(int(queries), int(length), window)
    values = head_numbers(v_pages)
    out = q.shape[0] * heads * values * q.element_size()
    small = 0 if sinks is None else nbytes(sinks)
    flops = 2.0 * pairs * heads * (size + values)
    return Cost(flops, nbytes(q) + live * token_bytes + small, out).on(page_operands(q, k_pages))


def _attention_shape(q: Tensor, k_pages: Tensor, v_pages: Tensor, *rest: object, **more: object) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], head_numbers(v_pages))


def live_keys(queries: int, length: int, window: Sight, page: int) -> Tensor:
    """Positions of the tokens in pages that any of the last `queries` tokens sees; only the last one may be partial."""
    if isinstance(window, Mask):
        pages = torch.from_numpy(live_pages(window, length - queries, length, page))
        keys = (pages[:, None] * page + torch.arange(page)).flatten()
        return keys[keys < length]
    return torch.arange(live_from(queries, length, window) // page * page, length)


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
    window: Sight = None,
    cap: float | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(cap(q k^T * scale) + mask) v for queries (tokens, heads, size); query head i reads KV head i * K // N.

    `sinks`: (heads) one more logit in each head's softmax. It has no value, so it only adds to the denominator.
    Pages may have another dtype than queries; rounded pages (`rounded_pages`) need the scales written with them.
    Sequences are computed one by one, so a result never depends on the batch, and only live pages are read.
    """
    out = q.new_empty(q.shape[0], q.shape[1], head_numbers(v_pages))
    for i, length in enumerate(meta.kv_len.tolist()):
        queries = slice(int(meta.q_start[i]), int(meta.q_start[i + 1]))
        key = live_keys(queries.stop - queries.start, length, window, meta.page_tokens)
        scores, v = masked_scores(q, k_pages, v_pages, meta, i, key, scale, window, cap, k_scales, v_scales)
        out[queries] = mixed_values(scores, v, sinks).to(q.dtype)
    return out


def head_scores(q: Tensor, k: Tensor, scale: float, cap: float | None = None) -> Tensor:
    """Scores (..., K, groups, queries, keys) of q (..., queries, heads, size) with k (..., keys, K, size)."""
    # (K, groups, queries, size) x (K, size, keys): query heads of one KV head are batched, keys are never repeated.
    grouped = q.unflatten(-2, (k.shape[-2], -1)).movedim(-4, -2)
    scores = torch.matmul(grouped, k.movedim(-3, -1)[..., :, None, :, :]) * scale
    return scores if cap is None else cap * torch.tanh(scores / cap)


def mixed_values(scores: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
    """(..., queries, heads, size): v (..., keys, K, size) weighted with the softmax of the scores. `sinks` (heads) are
    one more logit each, without a value."""
    if sinks is not None:
        logits = sinks.to(scores.dtype).view(*scores.shape[-4:-2], 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, logits), -1)
    weights = scores.softmax(-1)[..., : v.shape[-3]]
    return torch.matmul(weights, v.movedim(-3, -2)[..., :, None, :, :]).movedim(-2, -4).flatten(-3, -2)


def out_of_sight(at: Tensor, key: Tensor, sight: Sight) -> Tensor | None:
    """The keys before a query at each position that it does not see; None: it sees all."""
    if isinstance(sight, Mask):
        return ~sight.visible(at, key)
    return None if sight is None else key <= at - sight


def hidden_keys(at: Tensor, key: Tensor, sight: Sight, block: int = 0) -> Tensor:
    """The keys that a query at each position does not see. `block`: as in `PagedMeta`."""
    hidden = key > at if not block else key >= (at // block + 1) * block
    beyond = out_of_sight(at, key, sight)
    return hidden if beyond is None else hidden | beyond


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    hidden: Tensor,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of whole sequences: q (..., tokens, heads, size), k, v (..., keys, K, size), hidden (tokens, keys)."""
    return mixed_values(head_scores(q, k, scale, cap).masked_fill(hidden, float("-inf")), v, sinks)


def exact_dtype(q: Tensor, pages: Tensor) -> torch.dtype:
    """The dtype in which attention of the queries over the pages is computed."""
    held = torch.float32 if is_rounded(pages.dtype) else pages.dtype
    return torch.promote_types(torch.promote_types(q.dtype, held), torch.float32)


def masked_scores(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    meta: PagedMeta,
    sequence: int,
    key: Tensor,
    scale: float,
    window: Sight,
    cap: float | None,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The scores (K, groups, queries, keys) of a sequence's new tokens, -inf where a key is hidden, and the values
    (keys, K, size). `key`: the keys' positions, in whole pages; only the sequence's last page may be partial."""
    page, exact, length = meta.page_tokens, exact_dtype(q, k_pages), int(meta.kv_len[sequence])
    first, last = int(meta.q_start[sequence]), int(meta.q_start[sequence + 1])
    queries, key = last - first, key.to(q.device)
    table = meta.pages[sequence, key[::page] // page].long()
    k, v = (
        page_numbers(pages[table], None if scales is None else scales[table], exact).flatten(0, 1)[: len(key)]
        for pages, scales in ((k_pages, k_scales), (v_pages, v_scales))
    )
    scores = head_scores(q[first:last].to(exact), k, scale, cap)
    at = torch.arange(length - queries, length, device=q.device)[:, None]
    key = key[None, :]
    if meta.ancestors is not None and int(meta.ancestors[first]):
        at, key, hidden = _in_tree(meta.ancestors[first:last], length - queries, key)
        if (beyond := out_of_sight(at, key, window)) is not None:
            hidden = hidden | beyond
    else:
        hidden = hidden_keys(at, key, window, meta.block)
    return scores.masked_fill(hidden, float("-inf")), v


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms over each head of the queries and keys, applied before RoPE."""

    q: Tensor
    k: Tensor
    eps: float
    offset: float = 0.0


def _attend_cost(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    k_pages: Tensor,
    v_pages: Tensor,
    meta: PagedMeta,
    angles: tuple[Tensor, Tensor] | None,
    norms: HeadNorms | None,
    scale: float,
    window: Sight = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Cost:
    """New keys and values are counted as read once, not a second time from their pages."""
    cost = _attention_cost(q, k_pages, v_pages, meta, scale, window, cap, sinks=sinks)
    flops = 0.0
    new = [x for x in (k, v) if x is not None]
    for x in (q, *new[:1]):
        flops += 0.0 if norms is None else 4.0 * x.numel()
        flops += 0.0 if angles is None else 6.0 * x.shape[0] * x.shape[1] * angles[0].shape[1]
    small = nbytes(
        *([meta.slots] if new else []), *(angles or ()), *((norms.q, norms.k)[: 1 + bool(new)] if norms else ())
    )
    written = sum(x.numel() * pages.element_size() for x, pages in zip(new, (k_pages, v_pages), strict=False))
    return cost + Cost(flops, small, written)


@op(cost=_attend_cost, shape=_attention_shape)
def attend(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    k_pages: Tensor,
    v_pages: Tensor,
    meta: PagedMeta,
    angles: tuple[Tensor, Tensor] | None,
    norms: HeadNorms | None,
    scale: float,
    window: Sight = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Everything between the projections of an attention layer: norm and RoPE of queries and keys, KV page writes, and
    attention. Layers use it where a provider has it as one fused kernel. Without `k` and `v`, another layer has
    written the keys and values of the new tokens to the pages."""

    def turned(x: Tensor, weight: Tensor | None) -> Tensor:
        if norms is not None and weight is not None:
            x = rms_norm.body(x, weight, norms.eps, norms.offset)
        return x if angles is None else rotate.body(x, *angles)

    if k is not None and v is not None:
        write_pages.body(turned(k, None if norms is None else norms.k), k_pages, meta.slots)
        write_pages.body(v, v_pages, meta.slots)
    q = turned(q, None if norms is None else norms.q)
    return paged_attention.body(q, k_pages, v_pages, meta, scale, window, cap, sinks=sinks)
