"""Attention of absorbed queries over latents: flash decoding in which a tile of keys is also the tile of values.

Program (tile of rows, split, sequence or tile of queries) reads a part of a sequence's latents once for a tile of rows,
which are the heads of adjacent query tokens. Sequences with few new tokens are split over the multiprocessors, and the
last program to finish merges the partial results in the order of the splits. Others run in tiles of queries.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.attention.body import TREE_TOKENS, PagedMeta
from bankfull.ops.attention.triton.decode_launch import MOST_TOKENS, WIDTHS
from bankfull.ops.attention.triton.held import Held
from bankfull.ops.attention.triton.map import device_sequences, device_tiles, to_device
from bankfull.ops.attention.triton.splits import merged, scratch
from bankfull.ops.attention.triton.tile import (
    FLOATS,
    bit_count,
    dot_dtype,
    load_frames,
    log_sum,
    offsets,
    online_softmax,
    score_factors,
    visible_keys,
)
from bankfull.ops.latent.body import latent_attention
from bankfull.ops.triton.launch import multiprocessors, overlapped, power_of_two, start_next, wait_for_inputs
from bankfull.ops.triton.rows import contiguous_rows

BLOCK = 32
"""Keys of a tile. Two stages of 576 numbers in bfloat16 leave room for two programs on a multiprocessor."""
STAGES = 2
PROGRAMS = 2
"""Programs per multiprocessor that splits of sequences aim at."""
LEAST = 4
"""Fewest tiles of a split, except the last one: merging costs as much as reading several tiles."""
TILE_ROWS = 64
"""Rows (heads of query tokens) of a tile of a long sequence."""


@triton.jit
def store_latents(
    out,
    acc,
    peak,
    total,
    token,
    head,
    real,
    out_token,
    out_head,
    RANK: tl.constexpr,
    PADDED: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """Weighted latents divided by the sum of weights; zero for a row that saw no key. PARTIAL: as in `store_heads`."""
    numbers = tl.arange(0, PADDED)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    heads = out + token.to(tl.int64) * out_token + head * out_head
    if PARTIAL:
        tl.store(heads + RANK, log_sum(peak, total), mask=real)
    there = heads[:, None] + numbers[None, :]
    tl.store(there, acc.to(out.dtype.element_ty), mask=real[:, None] & (numbers < RANK)[None, :])


@triton.jit(do_not_specialize=["table_row", "splits", "window"])
def latent_attention_kernel(
    q,
    out,
    pages,
    table,
    starts,
    lengths,
    chosen,
    tiles,
    ancestors,
    begins,
    ends,
    past_lengths,
    partial_acc,
    partial_peak,
    partial_total,
    arrivals,
    q_token,
    q_head,
    out_token,
    out_head,
    frame,
    place,
    table_row,
    factor,
    window,
    splits,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PADDED: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    LEAST: tl.constexpr,
    PRODUCT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """`tiles`: (sequence, first token, tokens, tokens from there to the sequence's end) of each program of the last
    axis; None: it is a sequence, or a place in `chosen`. `ends`: the attention is partial, over keys that
    `attention_held` has counted."""
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    row_tile, split = tl.program_id(0), tl.program_id(1)
    pair = tl.program_id(2) * tl.num_programs(0) + row_tile
    if tiles is not None:
        record = tiles + tl.program_id(2) * 4
        sequence = tl.load(record)
        first = tl.load(record + 1)
        width = tl.load(record + 2)
        left = tl.load(record + 3)
        length = tl.load(lengths + sequence)
        known = tl.minimum(left, length)
    else:
        sequence = tl.program_id(2)
        if chosen is not None:
            sequence = tl.load(chosen + sequence)
        length = tl.load(lengths + sequence)
        first = tl.load(starts + sequence)
        width = tl.load(starts + sequence + 1) - first
        known = tl.minimum(width, length)  # a padding row has length 0: it sees no keys, and its result is zero
    # The tile's last query sees the most keys, its first one begins the window.
    tree = length - known
    end = tl.minimum(tree + width, length)
    begin = length * 0
    if window is not None:
        begin = tl.maximum(tree + 1 - window, 0)
    if ends is not None:
        tree = tl.load(past_lengths + sequence)
        end = length
        if tiles is not None:
            end = tl.load(ends + first + width - 1)
        if begins is not None:
            begin = tl.load(begins + first)
    base = begin // BLOCK * BLOCK
    count = tl.cdiv(tl.maximum(end - base, 0), BLOCK)
    share = tl.maximum(tl.cdiv(count, splits), LEAST)
    active = tl.maximum(tl.cdiv(count, share), 1)
    live = row_tile * ROWS + tl.arange(0, ROWS)
    if (split < active) & (row_tile * ROWS < width * HEADS):
        real = live < width * HEADS
        query = live // HEADS
        token = first + query
        head = live % HEADS
        position = tree + query
        path = None
        if ancestors is not None:
            path = tl.load(ancestors + token, mask=real, other=0)
            position = tl.where(path != 0, tree + bit_count(path).to(tl.int32) - 1, position)
        reach = window
        if ends is not None:
            position = tl.load(ends + token, mask=real, other=0) - 1
            if begins is not None:
                reach = position + 1 - tl.load(begins + token, mask=real, other=0)
        numbers = tl.arange(0, PADDED)
        turned = tl.arange(0, PADDED_ROPE)
        own = q + token.to(tl.int64) * q_token + head * q_head
        plain_query = tl.load(
            own[:, None] + numbers[None, :], mask=real[:, None] & (numbers < RANK)[None, :], other=0.0
        ).to(PRODUCT)
        rope_query = tl.load(
            own[:, None] + RANK + turned[None, :], mask=real[:, None] & (turned < ROPE)[None, :], other=0.0
        ).to(PRODUCT)
        table_base = table + sequence.to(tl.int64) * table_row
        low = base + split * share * BLOCK
        high = tl.minimum(low + share * BLOCK, end)
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, PADDED], tl.float32)
        # Page frames are loaded one iteration ahead, so that no load in the loop depends on another.
        frames = load_frames(table_base, low, begin, high, PAGE, BLOCK)
        for at in tl.range(low, high, BLOCK, num_stages=STAGES):
            key = at + tl.arange(0, BLOCK)
            inside = (key >= begin) & (key < high)
            places = offsets(frames, at, frame, place, PAGE, BLOCK)
            latents = tl.load(
                pages + places[:, None] + numbers[None, :],
                mask=inside[:, None] & (numbers < RANK)[None, :],
                other=0.0,
            ).to(PRODUCT)
            keys = tl.load(
                pages + places[:, None] + RANK + turned[None, :],
                mask=inside[:, None] & (turned < ROPE)[None, :],
                other=0.0,
            ).to(PRODUCT)
            score = tl.dot(plain_query, tl.trans(latents), input_precision="ieee")
            score = tl.dot(rope_query, tl.trans(keys), score, input_precision="ieee")
            seen = visible_keys(key, position, begin, high, reach, path, tree, False)
            score = tl.where(seen, score, float("-inf"))
            frames = load_frames(table_base, at + BLOCK, begin, high, PAGE, BLOCK)
            peak, total, acc = online_softmax(score, factor, latents, None, peak, total, acc, True)
        if active == 1:
            store_latents(out, acc, peak, total, token, head, real, out_token, out_head, RANK, PADDED, ends is not None)
        else:
            line = (pair * splits + split) * ROWS + tl.arange(0, ROWS)
            tl.store(partial_peak + line, peak, mask=real)
            tl.store(partial_total + line, total, mask=real)
            tl.store(partial_acc + line[:, None] * PADDED + numbers[None, :], acc, mask=real[:, None])
            # All warps must have finished their stores before one thread increments the counter.
            tl.debug_barrier()
            arrived = tl.atomic_add(arrivals + pair, 1, sem="acq_rel")
            if arrived == active - 1:
                whole, highest, weights = merged(
                    partial_acc, partial_peak, partial_total, pair * splits, active, real, PADDED, ROWS, ROWS, 1
                )
                store_latents(
                    out, whole, highest, weights, token, head, real, out_token, out_head, RANK, PADDED, ends is not None
                )
                # Reset for the next launch, which may be a replay of this one.
                tl.store(arrivals + pair, 0)


def _launch(
    q: Tensor,
    pages: Tensor,
    rank: int,
    meta: PagedMeta,
    starts: Tensor,
    lengths: Tensor,
    out: Tensor,
    scale: float,
    window: int | None,
    held: Held | None,
    *,
    width: int,
    chosen: Tensor | None = None,
    tiles: Tensor | None = None,
) -> None:
    """Sequences with at most `width` new tokens: the whole batch, or those `chosen`; or `tiles` of `width` tokens."""
    heads, size = q.shape[1:]
    table = contiguous_rows(meta.pages)
    rows = min(max(16, power_of_two(width * heads)), 16 if q.element_size() == 4 else TILE_ROWS)
    row_tiles = triton.cdiv(width * heads, rows)
    count = len(tiles) if tiles is not None else len(table) if chosen is None else len(chosen)
    padded = max(16, power_of_two(rank))
    block = 16 if q.element_size() == 4 else BLOCK
    splits = 1
    if tiles is None:
        room = PROGRAMS * multiprocessors(q.device) // max(1, count * row_tiles)
        splits = max(1, min(room, triton.cdiv(table.shape[1] * meta.page_tokens, block)))
    buffers = scratch(q.device, rows, padded)
    factor, _ = score_factors(scale, None)
    latent_attention_kernel[(row_tiles, splits, count)](
        q,
        out,
        pages,
        table,
        starts,
        lengths,
        chosen,
        tiles,
        None if tiles is not None else meta.ancestors,
        held and held.begins,
        held and held.ends,
        held and held.past_lengths,
        buffers.acc,
        buffers.peak,
        buffers.total,
        buffers.arrivals,
        *q.stride()[:2],
        *out.stride()[:2],
        *pages.stride()[:2],
        table.stride(0),
        factor,
        window,
        splits,
        heads,
        rank,
        size - rank,
        padded,
        max(16, power_of_two(size - rank)),
        meta.page_tokens,
        rows,
        block,
        STAGES,
        LEAST,
        dot_dtype(q),
        num_warps=4 if rows <= 16 else 8,
        **overlapped(q),
    )


def accepts(*, dtype: torch.dtype | None = None, pages: torch.dtype | None = None, **facts: object) -> bool:
    """Latents in the queries' dtype, or in one that converts to it without loss."""
    return dtype in FLOATS and (pages in (None, dtype) or (dtype is torch.float32 and pages in FLOATS))


@latent_attention.provider("triton", on="cuda", accepts=accepts)
def run_latent_attention(
    q: Tensor, pages: Tensor, rank: int, meta: PagedMeta, scale: float, window: int | None = None
) -> Tensor:
    if pages.shape[1:] != (meta.page_tokens, 1, q.shape[2]) or not 0 < rank < q.shape[2] or pages.stride(3) != 1:
        raise ValueError("latent_attention: shapes of queries, latents and page size do not match")
    q = contiguous_rows(q)
    out = torch.empty((*q.shape[:2], rank), dtype=q.dtype, device=q.device)
    return attend_latents(q, pages, rank, meta, out, scale, window)


def attend_latents(
    q: Tensor,
    pages: Tensor,
    rank: int,
    meta: PagedMeta,
    out: Tensor,
    scale: float,
    window: int | None,
    held: Held | None = None,
) -> Tensor:
    """`held`: partial attention over these keys; `meta` is theirs."""
    starts = to_device(meta.q_start, q.device) if meta.starts is None else meta.starts
    lengths = to_device(meta.kv_len, q.device) if meta.lengths is None else meta.lengths
    run = partial(_launch, q, pages, rank, meta, starts, lengths, out, scale, window, held)
    each = max(1, (16 if q.element_size() == 4 else TILE_ROWS) // q.shape[1])
    if meta.partition is not None:  # a captured step, whose sequences only the device knows
        run(width=each, tiles=meta.partition.tiles(each))
        if meta.partition.decodes is not None:
            run(width=1, chosen=meta.partition.decodes)
        return out
    counts = np.diff(meta.q_start)
    few = counts <= (MOST_TOKENS if meta.ancestors is None else TREE_TOKENS)
    long, short = np.flatnonzero(~few), np.flatnonzero(few)
    if len(long):
        run(width=each, tiles=device_tiles(meta.q_start, meta.kv_len, long, each, q.device))
    if len(short):
        width = next(most for most in WIDTHS if int(counts[short].max()) <= most)
        run(width=width, chosen=None if few.all() else device_sequences(short, q.device))
    return out
