"""Paged attention on a GPU. The kernel is chosen from host shapes alone, so a step can be captured.

Sequences with few new tokens use the decode kernel, which streams their KV cache once, split over the multiprocessors.
So do trees of drafts, which only this kernel supports. Others use the prefill kernel with tiles of queries, which alone
supports blocks whose tokens see each other. A mixed batch runs both. Sparse masks have a decode and a prefill kernel of
their own (`attention_sparse.py`), for the same shares of a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bankfull.ops.attention.body import TREE_TOKENS, HeadNorms, PagedMeta, SequencePartition, attend, paged_attention
from bankfull.ops.attention.triton.decode_launch import MOST_TOKENS, launch_decode
from bankfull.ops.attention.triton.held import Held
from bankfull.ops.attention.triton.map import device_sequences, device_tiles, to_device
from bankfull.ops.attention.triton.prefill_launch import launch_prefill
from bankfull.ops.attention.triton.rope import launch_rotate_and_write
from bankfull.ops.attention.triton.sparse import launch_sparse_decode, launch_sparse_prefill
from bankfull.ops.attention.triton.tile import FLOATS
from bankfull.ops.norm.triton import run_rms_norm
from bankfull.ops.pages.rounded import FP8, INT4, head_numbers, is_rounded
from bankfull.ops.rope.triton import run_rotate
from bankfull.ops.triton.rows import contiguous_rows
from bankfull.state.mask import Mask, Sight

LARGEST_HEAD = 256
"""Largest head size whose tile fits into registers."""


@cache
def reads_fp8() -> bool:
    """Whether the GPU has instructions for e4m3 numbers."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 9)


def accepts(*, dtype: torch.dtype | None = None, pages: torch.dtype | None = None, **facts: Any) -> bool:
    """KV pages in the queries' dtype, rounded, or in a dtype that converts to the queries' dtype without loss."""
    heads = facts.get("heads")
    rounded = pages is not None and is_rounded(pages) and (pages is not FP8 or reads_fp8())
    fits = pages in (None, dtype) or rounded or (dtype is torch.float32 and pages in FLOATS)
    # The kernel for sparse masks reads pages whose heads have one scale, or none.
    masked = heads is not None and heads.mask is not None and pages is INT4
    return dtype in FLOATS and fits and not masked and (heads is None or heads.size <= LARGEST_HEAD)


def _accepts_attend(**facts: Any) -> bool:
    """The fused operation takes no KV scales."""
    return accepts(**facts) and not is_rounded(facts.get("pages") or torch.float32)


def check(q: Tensor, k_pages: Tensor, v_pages: Tensor, meta: PagedMeta, window: Sight, sinks: Tensor | None) -> None:
    page, key_heads = k_pages.shape[1:3]
    if head_numbers(k_pages) != q.shape[2] or v_pages.shape[1:3] != (page, key_heads) or meta.page_tokens != page:
        raise ValueError("attention: shapes of queries, keys, values and page size do not match")
    if q.shape[1] % key_heads or len(meta.pages) != len(meta.kv_len):
        raise ValueError("attention: query heads must be a multiple of KV heads, with one page table per sequence")
    if any(part.stride(3) != 1 and part.shape[3] > 1 for part in (k_pages, v_pages)):
        raise ValueError("attention: each head's elements must be contiguous in a page")
    if meta.block and (window is not None or meta.ancestors is not None):
        raise ValueError("attention: blocks that see each other have neither a window nor a tree")
    if isinstance(window, int) and window < 1:
        raise ValueError(f"attention: a window of {window} tokens is too small; use at least 1")
    if sinks is not None and (sinks.shape != q.shape[1:2] or not sinks.is_contiguous()):
        raise ValueError(f"attention: {q.shape[1]} heads need one sink each, not {tuple(sinks.shape)}")


def checked_scales(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, k_scales: Tensor | None, v_scales: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    scales = None if k_scales is None or v_scales is None else (k_scales, v_scales)
    if (scales is None) == is_rounded(k_pages.dtype):
        raise ValueError(f"attention: KV pages in {k_pages.dtype} were passed {'no ' * (scales is None)}scales")
    if k_pages.dtype is INT4 and (k_pages.shape != v_pages.shape or q.shape[2] % 8):
        raise ValueError("attention: int4 keys and values must have heads of one size, a multiple of 8")
    return scales


def _on_device(meta: PagedMeta, device: torch.device) -> tuple[Tensor, Tensor]:
    starts = to_device(meta.q_start, device) if meta.starts is None else meta.starts
    lengths = to_device(meta.kv_len, device) if meta.lengths is None else meta.lengths
    return starts, lengths


def _most_few(meta: PagedMeta) -> int:
    """The most new tokens of a sequence for the decode kernel. One token sees the whole sequence, in blocks, too."""
    return 1 if meta.block else MOST_TOKENS


def _fresh(meta: PagedMeta) -> np.ndarray:
    """Long sequences that certainly have no past: the host never underestimates lengths."""
    counts = np.diff(meta.q_start)
    return (counts == meta.kv_len) & (counts > MOST_TOKENS)


def over_pages(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    scales: tuple[Tensor, Tensor] | None,
    meta: PagedMeta,
    out: Tensor,
    scale: float,
    window: Sight,
    cap: float | None,
    sinks: Tensor | None,
    own: tuple[Tensor, Tensor] | None = None,
    held: Held | None = None,
) -> Tensor:
    """Attention of final queries over pages that hold all keys and values; `own`: also the step's keys and values.
    `held`: partial attention over these keys; `meta` is theirs, and the window is in them."""
    if isinstance(window, Mask):
        return under_mask(q, k_pages, v_pages, scales, meta, out, scale, window, cap, sinks)
    if meta.partition is not None:
        return _by_partition(q, k_pages, v_pages, scales, meta, meta.partition, out, scale, window, cap, sinks)
    counts, table = np.diff(meta.q_start), contiguous_rows(meta.pages)
    few = counts <= (_most_few(meta) if meta.ancestors is None else TREE_TOKENS)
    fresh = _fresh(meta) & ~few & (own is not None)
    short, long, new = np.flatnonzero(few), np.flatnonzero(~few & ~fresh), np.flatnonzero(fresh)
    starts, lengths = _on_device(meta, q.device)
    for sequences, (keys, values) in ((long, (k_pages, v_pages)), (new, own or (k_pages, v_pages))):
        if len(sequences):
            tiles_of = partial(device_tiles, meta.q_start, meta.kv_len, sequences, device=q.device)
            launch_prefill(
                q,
                keys,
                values,
                scales,
                table,
                lengths,
                tiles_of,
                out,
                scale,
                window,
                cap,
                sinks,
                0 if held is not None else meta.block,
                held,
            )
    if len(short):
        launch_decode(
            q,
            None,
            k_pages,
            v_pages,
            scales,
            table,
            meta.slots,
            starts,
            lengths,
            device_sequences(short, q.device) if not few.all() else None,
            meta.ancestors,
            int(counts[short].max()),
            out,
            None,
            None,
            scale,
            window,
            cap,
            sinks,
            held,
        )
    return out


def under_mask(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    scales: tuple[Tensor, Tensor] | None,
    meta: PagedMeta,
    out: Tensor,
    scale: float,
    mask: Mask,
    cap: float | None,
    sinks: Tensor | None,
    partly: bool = False,
) -> Tensor:
    """`over_pages` with the kernels of sparse masks, also for captured steps. `partly`: partial attention over the
    pages that are here."""
    table, (starts, lengths) = contiguous_rows(meta.pages), _on_device(meta, q.device)
    tiles_of: Callable[[int], Tensor] | None
    if meta.partition is not None:
        tiles_of, width = meta.partition.tiles, 1 if meta.partition.decodes is not None else 0
        chosen = meta.partition.decodes
    else:
        counts = np.diff(meta.q_start)
        few = counts <= (MOST_TOKENS if meta.ancestors is None else TREE_TOKENS)
        short, long = np.flatnonzero(few), np.flatnonzero(~few)
        width = int(counts[short].max()) if len(short) else 0
        chosen = device_sequences(short, q.device) if width and len(long) else None
        tiles_of = partial(device_tiles, meta.q_start, meta.kv_len, long, device=q.device) if len(long) else None
    if tiles_of is not None:
        rest = tiles_of, out, scale, mask, cap, sinks, partly
        launch_sparse_prefill(q, k_pages, v_pages, scales, table, lengths, *rest)
    if width:
        args = starts, lengths, chosen, meta.ancestors, width, out, scale, mask, cap, sinks, partly
        launch_sparse_decode(q, k_pages, v_pages, scales, table, *args)
    return out


def _by_partition(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    scales: tuple[Tensor, Tensor] | None,
    meta: PagedMeta,
    partition: SequencePartition,
    out: Tensor,
    scale: float,
    window: int | None,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """`over_pages` for captured steps, whose sequences only the device knows. Padding tokens get no result."""
    assert meta.starts is not None and meta.lengths is not None and meta.ancestors is None
    table = contiguous_rows(meta.pages)
    launch_prefill(
        q, k_pages, v_pages, scales, table, meta.lengths, partition.tiles, out, scale, window, cap, sinks, meta.block
    )
    if partition.decodes is not None:
        launch_decode(
            q,
            None,
            k_pages,
            v_pages,
            scales,
            table,
            meta.slots,
            meta.starts,
            meta.lengths,
            partition.decodes,
            None,
            1,
            out,
            None,
            None,
            scale,
            window,
            cap,
            sinks,
        )
    return out


@paged_attention.provider("triton", on="cuda", accepts=accepts)
def run_paged_attention(
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
    check(q, k_pages, v_pages, meta, window, sinks)
    out = torch.empty((*q.shape[:2], head_numbers(v_pages)), dtype=q.dtype, device=q.device)
    scales = checked_scales(q, k_pages, v_pages, k_scales, v_scales)
    return over_pages(contiguous_rows(q), k_pages, v_pages, scales, meta, out, scale, window, cap, sinks)


@attend.provider("triton", on="cuda", accepts=_accepts_attend)
def run_attend(
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
    check(q, k_pages, v_pages, meta, window, sinks)
    q = contiguous_rows(q)
    new = None if k is None or v is None else (contiguous_rows(k), contiguous_rows(v))
    if angles is not None:
        angles = contiguous_rows(angles[0]), contiguous_rows(angles[1])
    if norms is not None:
        norms = HeadNorms(contiguous_rows(norms.q), contiguous_rows(norms.k), norms.eps, norms.offset)
    out = torch.empty((*q.shape[:2], v_pages.shape[3]), dtype=q.dtype, device=q.device)
    width = int(np.diff(meta.q_start).max())
    if meta.partition is None and width <= _most_few(meta) and not isinstance(window, Mask):
        launch_decode(
            q,
            new,
            k_pages,
            v_pages,
            None,
            contiguous_rows(meta.pages),
            meta.slots,
            *_on_device(meta, q.device),
            None,
            meta.ancestors,
            width,
            out,
            angles,
            norms,
            scale,
            window,
            cap,
            sinks,
        )
        return out
    if new is None:
        if norms is not None:
            q = run_rms_norm(q, norms.q, norms.eps, norms.offset)
        q = q if angles is None else run_rotate(q, *angles)
        return over_pages(q, k_pages, v_pages, None, meta, out, scale, window, cap, sinks)
    k, v = new
    # Pages of another dtype hold rounded keys and values, and all readers must see the same ones.
    fresh = meta.partition is None and not isinstance(window, Mask) and bool(_fresh(meta).any())
    keep = fresh and k_pages.dtype == k.dtype and v_pages.dtype == v.dtype
    rotated, keys = launch_rotate_and_write(q, k, v, k_pages, v_pages, meta.slots, angles, norms, keep)
    kept = (keys, v) if keep else None
    return over_pages(rotated, k_pages, v_pages, None, meta, out, scale, window, cap, sinks, kept)
