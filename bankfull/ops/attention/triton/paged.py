"""Paged attention on a GPU. The kernel is chosen from host shapes alone, so a step can be captured.

Sequences with few new tokens use the decode kernel, which streams their KV cache once, split over the multiprocessors.
So do trees of drafts, which only this kernel supports. Others use the prefill kernel with tiles of queries, which alone
supports blocks whose tokens see each other. A mixed batch runs both. Under a sparse mask, both read only listed keys.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bankfull.ops.attention.body import TREE_TOKENS, HeadNorms, PagedMeta, attend, paged_attention
from bankfull.ops.attention.triton.decode_launch import MOST_TOKENS, launch_decode
from bankfull.ops.attention.triton.map import Sequences, device_sequences, device_tiles
from bankfull.ops.attention.triton.prefill_launch import launch_prefill
from bankfull.ops.attention.triton.rope import Turn, launch_rotate_and_write
from bankfull.ops.attention.triton.tile import FLOATS, Scoring
from bankfull.ops.norm.triton import run_rms_norm
from bankfull.ops.pages.rounded import FP8, INT4, is_rounded
from bankfull.ops.pages.side import Cache, Pages
from bankfull.ops.rope.triton import run_rotate
from bankfull.ops.triton.rows import contiguous_rows
from bankfull.state.mask import Sight

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


def checked(q: Tensor, cache: Cache, meta: PagedMeta, scoring: Scoring) -> Cache:
    keys, values = cache
    page, key_heads = keys.at.shape[1:3]
    if keys.numbers != q.shape[2] or values.at.shape[1:3] != (page, key_heads) or meta.page_tokens != page:
        raise ValueError("attention: shapes of queries, keys, values and page size do not match")
    if q.shape[1] % key_heads or len(meta.pages) != len(meta.kv_len):
        raise ValueError("attention: query heads must be a multiple of KV heads, with one page table per sequence")
    if any(side.at.stride(3) != 1 and side.at.shape[3] > 1 for side in cache):
        raise ValueError("attention: each head's elements must be contiguous in a page")
    if meta.block and (scoring.sight is not None or meta.ancestors is not None):
        raise ValueError("attention: blocks that see each other have neither a window nor a tree")
    if isinstance(scoring.sight, int) and scoring.sight < 1:
        raise ValueError(f"attention: a window of {scoring.sight} tokens is too small; use at least 1")
    sinks = scoring.sinks
    if sinks is not None and (sinks.shape != q.shape[1:2] or not sinks.is_contiguous()):
        raise ValueError(f"attention: {q.shape[1]} heads need one sink each, not {tuple(sinks.shape)}")
    plain = keys.scales is None or values.scales is None
    if plain == is_rounded(keys.at.dtype):
        raise ValueError(f"attention: KV pages in {keys.at.dtype} were passed {'no ' * plain}scales")
    if keys.at.dtype is INT4 and (keys.at.shape != values.at.shape or q.shape[2] % 8):
        raise ValueError("attention: int4 keys and values must have heads of one size, a multiple of 8")
    return cache


def _most_few(meta: PagedMeta) -> int:
    """The most new tokens of a sequence for the decode kernel. One token sees the whole sequence, in blocks, too."""
    return 1 if meta.block else MOST_TOKENS


def _fresh(meta: PagedMeta) -> np.ndarray:
    """Long sequences that certainly have no past: the host never underestimates lengths."""
    counts = np.diff(meta.q_start)
    return (counts == meta.kv_len) & (counts > MOST_TOKENS)


def over_pages(
    q: Tensor,
    cache: Cache,
    meta: PagedMeta,
    sequences: Sequences,
    out: Tensor,
    scoring: Scoring,
    own: Cache | None = None,
) -> Tensor:
    """Attention of final queries over pages that hold all keys and values; `own`: also the step's keys and values."""
    block = 0 if sequences.ends is not None else meta.block
    if meta.partition is not None:  # a captured step, whose sequences only the device knows
        assert meta.starts is not None and meta.lengths is not None and meta.ancestors is None
        launch_prefill(q, cache, sequences, meta.partition.tiles, out, scoring, block)
        if meta.partition.decodes is not None:
            launch_decode(q, None, cache, sequences._replace(chosen=meta.partition.decodes), 1, out, Turn(), scoring)
        return out  # padding tokens get no result
    counts = np.diff(meta.q_start)
    few = counts <= (_most_few(meta) if meta.ancestors is None else TREE_TOKENS)
    fresh = _fresh(meta) & ~few & (own is not None)
    short, long, new = np.flatnonzero(few), np.flatnonzero(~few & ~fresh), np.flatnonzero(fresh)
    for some, held in ((long, cache), (new, own or cache)):
        if len(some):
            tiles_of = partial(device_tiles, meta.q_start, meta.kv_len, some, device=q.device)
            launch_prefill(q, held, sequences, tiles_of, out, scoring, block)
    if len(short):
        chosen = device_sequences(short, q.device) if not few.all() else None
        width = int(counts[short].max())
        launch_decode(q, None, cache, sequences._replace(chosen=chosen), width, out, Turn(), scoring)
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
    scoring = Scoring(scale, window, cap, sinks)
    cache = checked(q, Cache(Pages.of(k_pages, k_scales), Pages.of(v_pages, v_scales)), meta, scoring)
    out = torch.empty((*q.shape[:2], cache.values.numbers), dtype=q.dtype, device=q.device)
    return over_pages(contiguous_rows(q), cache, meta, Sequences.of(meta, q.device), out, scoring)


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
    scoring = Scoring(scale, window, cap, sinks)
    cache = checked(q, Cache(Pages.of(k_pages), Pages.of(v_pages)), meta, scoring)
    q, sequences = contiguous_rows(q), Sequences.of(meta, q.device)
    new = None if k is None or v is None else (contiguous_rows(k), contiguous_rows(v))
    turn = Turn.of(angles, norms)
    out = torch.empty((*q.shape[:2], v_pages.shape[3]), dtype=q.dtype, device=q.device)
    width = int(np.diff(meta.q_start).max())
    if meta.partition is None and width <= _most_few(meta) and scoring.mask is None:
        launch_decode(q, new, cache, sequences, width, out, turn, scoring)
        return out
    if new is None:
        if norms is not None:
            q = run_rms_norm(q, contiguous_rows(norms.q), norms.eps, norms.offset)
        q = q if angles is None else run_rotate(q, *angles)
        return over_pages(q, cache, meta, sequences, out, scoring)
    k, v = new
    # Pages of another dtype hold rounded keys and values, and all readers must see the same ones.
    fresh = meta.partition is None and scoring.mask is None and bool(_fresh(meta).any())
    keep = fresh and k_pages.dtype == k.dtype and v_pages.dtype == v.dtype
    q, k = launch_rotate_and_write(q, k, v, cache, meta.slots, turn, keep)
    return over_pages(q, cache, meta, sequences, out, scoring, Cache(Pages.of(k), Pages.of(v)) if keep else None)
