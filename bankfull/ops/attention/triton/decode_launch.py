"""Launches of the decode kernel: tiles and splits for the shapes of a batch."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from bankfull.ops.attention.body import TREE_TOKENS, HeadNorms
from bankfull.ops.attention.triton.decode import attention_decode
from bankfull.ops.attention.triton.held import Held
from bankfull.ops.attention.triton.splits import MERGED, most_queries, scratch, split_count, split_plan, tile_keys
from bankfull.ops.attention.triton.tile import dot_dtype, score_factors
from bankfull.ops.pages.rounded import INT4, head_numbers, int4_group
from bankfull.ops.triton.launch import INTERPRETED, multiprocessors, overlapped, power_of_two

MOST_TOKENS = 16
"""Sequences with more new tokens use the prefill kernel, unless they may have a tree."""
WIDTHS = (1, 4, MOST_TOKENS, 32, TREE_TOKENS)
"""New tokens per sequence that kernels are compiled for: padding rows of queries cost less than another kernel."""


def launch_decode(
    q: Tensor,
    new: tuple[Tensor, Tensor] | None,
    k_pages: Tensor,
    v_pages: Tensor,
    scales: tuple[Tensor, Tensor] | None,
    table: Tensor,
    slots: Tensor,
    starts: Tensor,
    lengths: Tensor,
    chosen: Tensor | None,
    ancestors: Tensor | None,
    width: int,
    out: Tensor,
    angles: tuple[Tensor, Tensor] | None,
    norms: HeadNorms | None,
    scale: float,
    window: int | None,
    cap: float | None,
    sinks: Tensor | None,
    held: Held | None = None,
) -> None:
    """Decode sequences with at most `width` new tokens: the whole batch, or those `chosen`. `new`: keys and values to
    be written to their pages; without them, queries are already final. `held`: partial attention over these keys, whose
    table, lengths and ancestors are passed."""
    heads, size = q.shape[1:]
    page, key_heads = v_pages.shape[1:3]
    values = head_numbers(v_pages)
    groups = heads // key_heads
    width = next(most for most in WIDTHS if width <= most)
    paired = k_pages.dtype is INT4
    words = scales is not None and new is None and all(map(_in_words, (k_pages, v_pages)))
    least = 64 if paired and words else 32 if paired or words else 16
    padded, padded_values = (max(least, power_of_two(n)) for n in (size, values))
    largest = max(padded, padded_values)
    most_rows = most_queries(largest, q.element_size())
    live = min(power_of_two(groups * width), most_rows)
    rows = max(16, live)
    row_tiles = triton.cdiv(groups * width, rows)
    sequences = len(table) if chosen is None else len(chosen)
    pairs = sequences * key_heads * row_tiles
    early = new is not None and pairs <= multiprocessors(q.device)
    plan = split_plan(pairs, live, multiprocessors(q.device), new is not None)
    block = tile_keys(largest, q.element_size(), k_pages.element_size(), plan.tile_bytes)
    most = split_count(pairs, table.shape[1] * page, block, plan.programs * multiprocessors(q.device))
    splits = min(most, plan.most_splits)
    buffers = scratch(q.device, rows, padded_values)
    k, v = new or (q, q)
    cos, sin = angles or (None, None)
    k_scales, v_scales = scales or (None, None)
    inner, outer = score_factors(scale, cap)
    attention_decode[(key_heads * row_tiles, most, sequences)](
        q,
        k,
        v,
        out,
        k_pages,
        v_pages,
        k_scales,
        v_scales,
        table,
        slots,
        starts,
        lengths,
        chosen,
        ancestors,
        held and held.begins,
        held and held.ends,
        held and held.past_lengths,
        sinks,
        cos,
        sin,
        norms and norms.q,
        norms and norms.k,
        buffers.acc,
        buffers.peak,
        buffers.total,
        buffers.arrivals,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        out.stride(0),
        *k_pages.stride()[:3],
        *v_pages.stride()[:3],
        *((0, 0, 0) if k_scales is None else k_scales.stride()[:3]),
        *((0, 0, 0) if v_scales is None else v_scales.stride()[:3]),
        table.stride(0),
        0 if cos is None else cos.stride(0),
        0 if sin is None else sin.stride(0),
        inner,
        outer,
        norms.eps if norms else 0.0,
        norms.offset if norms else 0.0,
        window,
        splits,
        groups,
        size,
        values,
        padded,
        padded_values,
        1 if cos is None else cos.shape[1],
        bool(norms and norms.offset),
        page,
        cap is not None,
        new is not None,
        k_pages.stride()[:2] == v_pages.stride()[:2],
        rows,
        live,
        row_tiles,
        1 if width == 1 else 16,
        block,
        plan.stages,
        plan.least,
        early,
        min(plan.at_once, max(1, MERGED // (live * padded_values))),
        dot_dtype(q),
        int4_group(size) if paired else 0,
        words,
        1 if scales is None else min(map(_alignment, scales)),
        words and not INTERPRETED and q.dtype is torch.bfloat16 and torch.version.hip is None,
        num_warps=plan.warps,
        **overlapped(q),
    )


def _alignment(scales: Tensor) -> int:
    """The largest power of two of bytes, up to 16, at which the scales of every token and head begin."""
    apart = math.gcd(scales.data_ptr(), *(n * scales.element_size() for n in scales.stride()[:3]))
    return math.gcd(apart, 16)


def _in_words(pages: Tensor) -> bool:
    """Whether the heads of rounded pages begin and end at whole words of two bytes."""
    return not any(n % 2 for n in (pages.data_ptr(), pages.shape[-1], *pages.stride()[:-1]))
