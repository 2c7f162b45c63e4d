"""Attention over pages on a GPU. Which kernel runs follows from host shapes alone, so a step can be captured.

A sequence with few new tokens is decoded: its keys and values are streamed once, split over the multiprocessors. Others
go in tiles of queries. A batch of both kinds runs both kernels.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bankfull.ops.reference.attention import HeadNorms, PagedMeta, Shares, attend, paged_attention
from bankfull.ops.triton.attention_decode import MOST_TOKENS, launch_decode
from bankfull.ops.triton.attention_map import ship, shipped_sequences, shipped_tiles
from bankfull.ops.triton.attention_prefill import launch_prefill
from bankfull.ops.triton.attention_tile import FLOATS
from bankfull.ops.triton.attention_turn import launch_turn_and_write

LARGEST_HEAD = 256
"""A tile of it still fits the registers."""


def _accepts(*, dtype: torch.dtype | None = None, pages: torch.dtype | None = None, **facts: Any) -> bool:
    """Pages in the dtype of the queries, or in one that loses nothing when it becomes that."""
    heads = facts.get("heads")
    fits = pages in (None, dtype, torch.int8) or (dtype is torch.float32 and pages in FLOATS)
    return dtype in FLOATS and fits and (heads is None or heads.size <= LARGEST_HEAD)


def _accepts_attend(**facts: Any) -> bool:
    """The operation has no place for scales."""
    return _accepts(**facts) and facts.get("pages") is not torch.int8


def _side_by_side(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _check(q: Tensor, k_pages: Tensor, v_pages: Tensor, meta: PagedMeta, window: int | None) -> None:
    page, key_heads, size = k_pages.shape[1:]
    if size != q.shape[2] or v_pages.shape[1:3] != (page, key_heads) or meta.page_tokens != page:
        raise ValueError("attention: queries, keys, values and page tables have sizes that do not fit each other")
    if q.shape[1] % key_heads or len(meta.pages) != len(meta.kv_len):
        raise ValueError("attention: there is not one key head for each group, or not one table for each sequence")
    if any(part.stride(3) != 1 and part.shape[3] > 1 for part in (k_pages, v_pages)):
        raise ValueError("attention: the numbers of a head must lie side by side in a page")
    if window is not None and window < 1:
        raise ValueError(f"attention: a window of {window} tokens leaves nothing to look at")


def _on_device(meta: PagedMeta, device: torch.device) -> tuple[Tensor, Tensor]:
    starts = ship(meta.q_start, device) if meta.starts is None else meta.starts
    lengths = ship(meta.kv_len, device) if meta.lengths is None else meta.lengths
    return starts, lengths


def _fresh(meta: PagedMeta) -> np.ndarray:
    """Which long sequences surely have nothing before this step: what the host knows of lengths is never too little."""
    counts = np.diff(meta.q_start)
    return (counts == meta.kv_len) & (counts > MOST_TOKENS)


def _over_pages(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    scales: tuple[Tensor, Tensor] | None,
    meta: PagedMeta,
    out: Tensor,
    scale: float,
    window: int | None,
    cap: float | None,
    own: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Queries that are ready; all keys and values are in their pages. Those of the step are in `own`, too, if given."""
    if meta.shares is not None:
        return _by_shares(q, k_pages, v_pages, scales, meta, meta.shares, out, scale, window, cap)
    counts, table = np.diff(meta.q_start), _side_by_side(meta.pages)
    few, fresh = counts <= MOST_TOKENS, _fresh(meta) & (own is not None)
    short, long, new = np.flatnonzero(few), np.flatnonzero(~few & ~fresh), np.flatnonzero(fresh)
    starts, lengths = _on_device(meta, q.device)
    for sequences, (keys, values) in ((long, (k_pages, v_pages)), (new, own or (k_pages, v_pages))):
        if len(sequences):
            tiles_of = partial(shipped_tiles, meta.q_start, meta.kv_len, sequences, device=q.device)
            launch_prefill(q, keys, values, scales, table, lengths, tiles_of, out, scale, window, cap)
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
            shipped_sequences(short, q.device) if not few.all() else None,
            int(counts[short].max()),
            out,
            None,
            None,
            scale,
            window,
            cap,
        )
    return out


def _by_shares(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    scales: tuple[Tensor, Tensor] | None,
    meta: PagedMeta,
    shares: Shares,
    out: Tensor,
    scale: float,
    window: int | None,
    cap: float | None,
) -> Tensor:
    """The same where only the device knows which sequences there are. Tokens that fill up the step get no result."""
    assert meta.starts is not None and meta.lengths is not None
    table = _side_by_side(meta.pages)
    launch_prefill(q, k_pages, v_pages, scales, table, meta.lengths, shares.tiles, out, scale, window, cap)
    if shares.ones is not None:
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
            shares.ones,
            1,
            out,
            None,
            None,
            scale,
            window,
            cap,
        )
    return out


@paged_attention.provider("triton", on="cuda", accepts=_accepts)
def run_paged_attention(
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
    _check(q, k_pages, v_pages, meta, window)
    out = torch.empty((*q.shape[:2], v_pages.shape[3]), dtype=q.dtype, device=q.device)
    scales = None if k_scales is None or v_scales is None else (k_scales, v_scales)
    if (scales is None) == (k_pages.dtype is torch.int8):
        raise ValueError(f"attention: pages in {k_pages.dtype} were given {'no ' * (scales is None)}scales")
    return _over_pages(_side_by_side(q), k_pages, v_pages, scales, meta, out, scale, window, cap)


@attend.provider("triton", on="cuda", accepts=_accepts_attend)
def run_attend(
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
    _check(q, k_pages, v_pages, meta, window)
    q, k, v = _side_by_side(q), _side_by_side(k), _side_by_side(v)
    if angles is not None:
        angles = _side_by_side(angles[0]), _side_by_side(angles[1])
    if norms is not None:
        norms = HeadNorms(_side_by_side(norms.q), _side_by_side(norms.k), norms.eps, norms.offset)
    out = torch.empty((*q.shape[:2], v_pages.shape[3]), dtype=q.dtype, device=q.device)
    width = int(np.diff(meta.q_start).max())
    if meta.shares is None and width <= MOST_TOKENS:
        launch_decode(
            q,
            (k, v),
            k_pages,
            v_pages,
            None,
            _side_by_side(meta.pages),
            meta.slots,
            *_on_device(meta, q.device),
            None,
            width,
            out,
            angles,
            norms,
            scale,
            window,
            cap,
        )
        return out
    # Pages of another dtype have rounded what they hold, for every reader alike.
    keep = meta.shares is None and bool(_fresh(meta).any()) and k_pages.dtype == k.dtype and v_pages.dtype == v.dtype
    ready, keys = launch_turn_and_write(q, k, v, k_pages, v_pages, meta.slots, angles, norms, keep)
    return _over_pages(ready, k_pages, v_pages, None, meta, out, scale, window, cap, (keys, v) if keep else None)
