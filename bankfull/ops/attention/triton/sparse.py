"""Paged attention under a sparse mask: only the keys that some query of a tile sees are read, wherever they lie.

Both kernels walk the list of `attention_listed.py`. The decode kernel splits it over programs, as `attention_decode.py`
splits a sequence, and supports trees of drafts. The prefill kernel has a tile of queries per program.
"""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.attention.triton.decode_launch import WIDTHS
from bankfull.ops.attention.triton.listed import attend_listed, most_listed, numbers_of, sight_of
from bankfull.ops.attention.triton.prefill_launch import tile_shape
from bankfull.ops.attention.triton.splits import LATE, MERGED, merged, most_queries, scratch, split_count, tile_keys
from bankfull.ops.attention.triton.tile import bit_count, dot_dtype, score_factors, store_heads
from bankfull.ops.triton.launch import multiprocessors, overlapped, power_of_two, start_next, wait_for_inputs
from bankfull.state.mask import Mask


@triton.jit(do_not_specialize=["table_row", "splits"])
def sparse_decode(
    q,
    out,
    k_pages,
    v_pages,
    k_scales,
    v_scales,
    table,
    starts,
    lengths,
    chosen,
    ancestors,
    sinks,
    partial_acc,
    partial_peak,
    partial_total,
    arrivals,
    q_token,
    q_head,
    out_token,
    k_frame,
    k_place,
    k_page_head,
    v_frame,
    v_place,
    v_page_head,
    k_scale_frame,
    k_scale_place,
    k_scale_head,
    v_scale_frame,
    v_scale_place,
    v_scale_head,
    table_row,
    inner,
    outer,
    splits,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    VALUES: tl.constexpr,
    PADDED: tl.constexpr,
    PADDED_VALUES: tl.constexpr,
    PAGE: tl.constexpr,
    CAPPED: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PRODUCT: tl.constexpr,
    MASK: tl.constexpr,
    PARTIAL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (KV head and tile of its rows, split, sequence). Row = token * GROUPS + head within the group."""
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    key_head = tl.program_id(0) // ROW_TILES
    row_tile = tl.program_id(0) % ROW_TILES
    split = tl.program_id(1)
    sequence = tl.program_id(2)
    pair = sequence * tl.num_programs(0) + tl.program_id(0)
    if chosen is not None:
        sequence = tl.load(chosen + sequence)
    length = tl.load(lengths + sequence)
    first = tl.load(starts + sequence)
    width = tl.load(starts + sequence + 1) - first
    # A padding row (length 0) sees no keys, and its result is zero.
    known = tl.minimum(width, length)
    past = length - known
    row = row_tile * ROWS + tl.arange(0, ROWS)
    query = row // GROUPS
    real = query < width
    # The queries of this tile; with trees all of the sequence, because depths do not follow the order of slots.
    begin = row_tile * ROWS // GROUPS
    count = tl.minimum((row_tile * ROWS + ROWS - 1) // GROUPS + 1, known) - begin
    end = past + begin + count
    tree_tokens = length * 0
    path = None
    position = past + query
    if ancestors is not None:
        begin = begin * 0
        count = known
        end = past
        tree_tokens = known
        path = tl.load(ancestors + first + query, mask=real, other=0)
        position = tl.where(path != 0, past + bit_count(path).to(tl.int32) - 1, position)
    sight = sight_of(past + begin, tl.maximum(count, 1), end, MASK)
    listed = tl.where(count > 0, sight[0] + sight[4] + sight[8] + tree_tokens, 0)
    tiles = tl.cdiv(listed, BLOCK)
    share = tl.maximum(tl.cdiv(tiles, splits), 1)
    active = tl.maximum(tl.cdiv(tiles, share), 1)
    if split < active:
        token = (first + query).to(tl.int64)
        head = key_head * GROUPS + row % GROUPS
        dims = tl.arange(0, PADDED)
        queries = tl.load(
            q + (token * q_token + head * q_head)[:, None] + dims[None, :],
            mask=real[:, None] & (dims < SIZE)[None, :],
            other=0.0,
        ).to(PRODUCT)
        k_scales_base, v_scales_base = None, None
        if k_scales is not None:
            k_scales_base = k_scales + key_head * k_scale_head
            v_scales_base = v_scales + key_head * v_scale_head
        low = split * share * BLOCK
        peak, total, acc = attend_listed(
            low,
            tl.minimum(low + share * BLOCK, listed),
            queries,
            position,
            path,
            None if ancestors is None else ancestors + first,
            end,
            tree_tokens,
            sight,
            k_pages + key_head * k_page_head,
            v_pages + key_head * v_page_head,
            k_scales_base,
            v_scales_base,
            table + sequence.to(tl.int64) * table_row,
            k_frame,
            k_place,
            v_frame,
            v_place,
            k_scale_frame,
            k_scale_place,
            v_scale_frame,
            v_scale_place,
            inner,
            outer,
            ROWS,
            SIZE,
            VALUES,
            PADDED,
            PADDED_VALUES,
            PAGE,
            CAPPED,
            BLOCK,
            STAGES,
            PRODUCT,
            MASK,
            PARTIAL,
        )
        if active == 1:
            store_heads(out, acc, peak, total, sinks, token, head, real, out_token, VALUES, PADDED_VALUES, PARTIAL)
        else:
            line = (pair * splits + split) * ROWS + tl.arange(0, ROWS)
            numbers = tl.arange(0, PADDED_VALUES)
            tl.store(partial_peak + line, peak, mask=real)
            tl.store(partial_total + line, total, mask=real)
            tl.store(partial_acc + line[:, None] * PADDED_VALUES + numbers[None, :], acc, mask=real[:, None])
            # All warps must have finished their stores before one thread increments the counter.
            tl.debug_barrier()
            arrived = tl.atomic_add(arrivals + pair, 1, sem="acq_rel")
            if arrived == active - 1:
                acc, peak, total = merged(
                    partial_acc,
                    partial_peak,
                    partial_total,
                    pair * splits,
                    active,
                    real,
                    PADDED_VALUES,
                    ROWS,
                    ROWS,
                    AT_ONCE,
                )
                store_heads(out, acc, peak, total, sinks, token, head, real, out_token, VALUES, PADDED_VALUES, PARTIAL)
                # Reset for the next launch, which may be a replay of this one.
                tl.store(arrivals + pair, 0)


@triton.jit(do_not_specialize=["table_row"])
def sparse_prefill(
    q,
    out,
    k_pages,
    v_pages,
    k_scales,
    v_scales,
    table,
    lengths,
    tiles,
    sinks,
    q_token,
    q_head,
    out_token,
    k_frame,
    k_place,
    k_page_head,
    v_frame,
    v_place,
    v_page_head,
    k_scale_frame,
    k_scale_place,
    k_scale_head,
    v_scale_frame,
    v_scale_place,
    v_scale_head,
    table_row,
    inner,
    outer,
    HEAD_TILES: tl.constexpr,
    GROUPS: tl.constexpr,
    PACKED: tl.constexpr,
    SIZE: tl.constexpr,
    VALUES: tl.constexpr,
    PADDED: tl.constexpr,
    PADDED_VALUES: tl.constexpr,
    PAGE: tl.constexpr,
    CAPPED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PRODUCT: tl.constexpr,
    MASK: tl.constexpr,
    PARTIAL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Tiles as in `attention_prefill`; an empty tile of a captured step stores nothing."""
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    tile = tiles + tl.program_id(0) // HEAD_TILES * 4
    sequence = tl.load(tile)
    first = tl.load(tile + 1)
    count = tl.load(tile + 2)
    past = tl.load(lengths + sequence) - tl.load(tile + 3)
    first_head = tl.program_id(0) % HEAD_TILES * PACKED
    key_head = first_head // GROUPS
    row = tl.arange(0, ROWS)
    real = row < count * PACKED
    token = (first + row // PACKED).to(tl.int64)
    head = first_head + row % PACKED
    dims = tl.arange(0, PADDED)
    queries = tl.load(
        q + (token * q_token + head * q_head)[:, None] + dims[None, :],
        mask=real[:, None] & (dims < SIZE)[None, :],
        other=0.0,
    ).to(PRODUCT)
    end = past + count
    sight = sight_of(past, tl.maximum(count, 1), end, MASK)
    k_scales_base, v_scales_base = None, None
    if k_scales is not None:
        k_scales_base = k_scales + key_head * k_scale_head
        v_scales_base = v_scales + key_head * v_scale_head
    peak, total, acc = attend_listed(
        count * 0,
        tl.where(count > 0, sight[0] + sight[4] + sight[8], 0),
        queries,
        past + row // PACKED,
        None,
        None,
        end,
        count * 0,
        sight,
        k_pages + key_head * k_page_head,
        v_pages + key_head * v_page_head,
        k_scales_base,
        v_scales_base,
        table + sequence.to(tl.int64) * table_row,
        k_frame,
        k_place,
        v_frame,
        v_place,
        k_scale_frame,
        k_scale_place,
        v_scale_frame,
        v_scale_place,
        inner,
        outer,
        ROWS,
        SIZE,
        VALUES,
        PADDED,
        PADDED_VALUES,
        PAGE,
        CAPPED,
        BLOCK,
        STAGES,
        PRODUCT,
        MASK,
        PARTIAL,
    )
    store_heads(out, acc, peak, total, sinks, token, head, real, out_token, VALUES, PADDED_VALUES, PARTIAL)


def launch_sparse_decode(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    scales: tuple[Tensor, Tensor] | None,
    table: Tensor,
    starts: Tensor,
    lengths: Tensor,
    chosen: Tensor | None,
    ancestors: Tensor | None,
    width: int,
    out: Tensor,
    scale: float,
    mask: Mask,
    cap: float | None,
    sinks: Tensor | None,
    partial: bool = False,
) -> None:
    """Sequences with at most `width` new tokens, whose keys and values are in their pages. `partial`: those of entries
    of the table that are not negative, with a log-sum-exp after each head."""
    heads, size = q.shape[1:]
    page, key_heads, values = v_pages.shape[1:]
    groups = heads // key_heads
    width = next(most for most in WIDTHS if width <= most)
    padded, padded_values = (max(16, power_of_two(n)) for n in (size, values))
    largest = max(padded, padded_values)
    rows = max(16, min(power_of_two(groups * width), most_queries(largest, q.element_size())))
    row_tiles = triton.cdiv(groups * width, rows)
    sequences = len(table) if chosen is None else len(chosen)
    pairs = sequences * key_heads * row_tiles
    block = tile_keys(largest, q.element_size(), k_pages.element_size(), LATE.tile_bytes)
    listed = most_listed(mask, width, table.shape[1] * page)
    splits = split_count(pairs, listed, block, LATE.programs * multiprocessors(q.device))
    splits = min(splits, LATE.most_splits)
    buffers = scratch(q.device, rows, padded_values)
    k_scales, v_scales = scales or (None, None)
    sparse_decode[(key_heads * row_tiles, splits, sequences)](
        q,
        out,
        k_pages,
        v_pages,
        k_scales,
        v_scales,
        table,
        starts,
        lengths,
        chosen,
        ancestors,
        sinks,
        buffers.acc,
        buffers.peak,
        buffers.total,
        buffers.arrivals,
        *q.stride()[:2],
        out.stride(0),
        *k_pages.stride()[:3],
        *v_pages.stride()[:3],
        *((0, 0, 0) if k_scales is None else k_scales.stride()),
        *((0, 0, 0) if v_scales is None else v_scales.stride()),
        table.stride(0),
        *score_factors(scale, cap),
        splits,
        groups,
        size,
        values,
        padded,
        padded_values,
        page,
        cap is not None,
        rows,
        row_tiles,
        block,
        LATE.stages,
        min(LATE.at_once, max(1, MERGED // (rows * padded_values))),
        dot_dtype(q),
        numbers_of(mask),
        partial,
        num_warps=LATE.warps,
        **overlapped(q),
    )


def launch_sparse_prefill(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    scales: tuple[Tensor, Tensor] | None,
    table: Tensor,
    lengths: Tensor,
    tiles_of: Callable[[int], Tensor],
    out: Tensor,
    scale: float,
    mask: Mask,
    cap: float | None,
    sinks: Tensor | None,
    partial: bool = False,
) -> None:
    """The tiles that `tiles_of(tokens per tile)` returns, over pages that hold all keys and values. `partial`: as for
    decoding."""
    heads, size = q.shape[1:]
    page, key_heads, values = v_pages.shape[1:]
    groups = heads // key_heads
    padded, padded_values = (max(16, power_of_two(n)) for n in (size, values))
    rows, block, warps, stages = tile_shape(max(padded, padded_values), q.element_size())
    packed = groups if groups <= rows else 1
    tiles = tiles_of(rows // packed)
    k_scales, v_scales = scales or (None, None)
    sparse_prefill[(len(tiles) * (heads // packed),)](
        q,
        out,
        k_pages,
        v_pages,
        k_scales,
        v_scales,
        table,
        lengths,
        tiles,
        sinks,
        *q.stride()[:2],
        out.stride(0),
        *k_pages.stride()[:3],
        *v_pages.stride()[:3],
        *((0, 0, 0) if k_scales is None else k_scales.stride()),
        *((0, 0, 0) if v_scales is None else v_scales.stride()),
        table.stride(0),
        *score_factors(scale, cap),
        heads // packed,
        groups,
        packed,
        size,
        values,
        padded,
        padded_values,
        page,
        cap is not None,
        rows,
        block,
        stages,
        dot_dtype(q),
        numbers_of(mask),
        partial,
        num_warps=warps,
        **overlapped(q),
    )
