"""Attention of sequences with many new tokens: the work is in the products, so a program keeps a tile of queries.

A tile holds neighbouring tokens and, of each, the heads that share a key head: keys and values that are loaded once
serve them all. Which tiles there are is known on the host, and crosses as one small array.

Sequences that begin with this step have all their keys and values in the step's own rows, side by side: read there
instead of in pages, with no page to look up, the same numbers take a fifth less time. Where they lie as a tensor map
can say it, the card's copy engine fetches them tile by tile, and no thread computes an address.
"""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from bankfull.ops.triton.attention_tile import (
    absorbed,
    capped,
    look_up,
    multiplied_as,
    places,
    score_factors,
    store_heads,
)
from bankfull.ops.triton.launch import INTERPRETED, overlapped, power_of_two, start_next, wait_for_inputs


@triton.jit
def walk(
    low,
    high,
    begin,
    end,
    queries,
    position,
    k_base,
    v_base,
    k_scales,
    v_scales,
    table_base,
    own,
    key_head,
    k_frame,
    k_place,
    v_frame,
    v_place,
    k_scale_frame,
    k_scale_place,
    k_scale_head,
    v_scale_frame,
    v_scale_place,
    v_scale_head,
    inner,
    outer,
    window,
    peak,
    total,
    mixed,
    SIZE: tl.constexpr,
    VALUES: tl.constexpr,
    PADDED: tl.constexpr,
    PADDED_VALUES: tl.constexpr,
    PAGE: tl.constexpr,
    CAPPED: tl.constexpr,
    ALIKE: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PRODUCT: tl.constexpr,
    FRESH: tl.constexpr,
    MAPPED: tl.constexpr,
    BORDER: tl.constexpr,
):
    """The running softmax over the keys low .. high. BORDER: not every query sees each of them; outside of begin .. end
    there is nothing to read. ALIKE: values lie in their frames as keys do. FRESH: there are no frames; the first key is
    at the base, or, where the bases are MAPPED, in row `own`."""
    dims = tl.arange(0, PADDED)
    numbers = tl.arange(0, PADDED_VALUES)
    within = tl.arange(0, BLOCK)
    factor = inner
    if CAPPED:
        factor = 1.0
    # The pages of a tile are looked up one step before they are needed: no load of the loop waits for another.
    frames = within
    if not FRESH:
        frames = look_up(table_base, low, begin, tl.minimum(high, end), PAGE, BLOCK)
    # A border has a tile or two, and its masked values take room of their own: two programs must fit side by side.
    DEPTH: tl.constexpr = 2 if MAPPED and BORDER else STAGES
    for at in tl.range(low, high, BLOCK, num_stages=DEPTH):
        key = at + within
        inside = (key >= begin) & (key < end)
        if MAPPED:
            keys = k_base.load([own + at, key_head * SIZE])
            values = v_base.load([own + at, key_head * VALUES])
            if BORDER:
                # Rows of another sequence: their weight is 0, but 0 times what is not finite would be NaN.
                values = tl.where(inside[:, None], values, 0.0)
        else:
            if FRESH:
                before = (begin * 0 + at).to(tl.int64)  # to the interpreter `at` is a plain number, without a type
                k_there = k_base + before * k_place + (within[:, None] * k_place + dims[None, :])
                v_there = v_base + before * v_place + (within[:, None] * v_place + numbers[None, :])
            else:
                k_places = places(frames, at, k_frame, k_place, PAGE, BLOCK)
                v_places = k_places if ALIKE else places(frames, at, v_frame, v_place, PAGE, BLOCK)
                k_there = k_base + k_places[:, None] + dims[None, :]
                v_there = v_base + v_places[:, None] + numbers[None, :]
            if BORDER:
                keys = tl.load(k_there, mask=inside[:, None] & (dims < SIZE)[None, :], other=0.0)
                values = tl.load(v_there, mask=inside[:, None] & (numbers < VALUES)[None, :], other=0.0)
            else:
                keys = tl.load(k_there) if SIZE == PADDED else tl.load(k_there, mask=(dims < SIZE)[None, :], other=0.0)
                ragged = (numbers < VALUES)[None, :]
                values = tl.load(v_there) if VALUES == PADDED_VALUES else tl.load(v_there, mask=ragged, other=0.0)
        score = tl.dot(queries, tl.trans(keys.to(PRODUCT)), input_precision="ieee")
        value_scale = None
        if k_scales is not None:
            scales = k_scales + key_head * k_scale_head + places(frames, at, k_scale_frame, k_scale_place, PAGE, BLOCK)
            score = score * tl.load(scales, mask=inside, other=0.0)[None, :]
            scales = v_scales + key_head * v_scale_head + places(frames, at, v_scale_frame, v_scale_place, PAGE, BLOCK)
            value_scale = tl.load(scales, mask=inside, other=0.0)
        if CAPPED:
            score = capped(score, inner, outer)
        if BORDER:
            seen = inside[None, :] & (key[None, :] <= position[:, None])
            if window is not None:
                seen = seen & (key[None, :] > position[:, None] - window)
            score = tl.where(seen, score, float("-inf"))
        if not FRESH:
            frames = look_up(table_base, at + BLOCK, begin, tl.minimum(high, end), PAGE, BLOCK)
        peak, total, mixed = absorbed(score, factor, values.to(PRODUCT), value_scale, peak, total, mixed, BORDER)
    return peak, total, mixed


@triton.jit(do_not_specialize=["table_row", "window"])
def attention_prefill(
    q,
    out,
    k_pages,
    v_pages,
    k_scales,
    v_scales,
    table,
    lengths,
    tiles,
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
    window,
    HEAD_TILES: tl.constexpr,
    GROUPS: tl.constexpr,
    PACKED: tl.constexpr,
    SIZE: tl.constexpr,
    VALUES: tl.constexpr,
    PADDED: tl.constexpr,
    PADDED_VALUES: tl.constexpr,
    PAGE: tl.constexpr,
    CAPPED: tl.constexpr,
    ALIKE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PRODUCT: tl.constexpr,
    FRESH: tl.constexpr,
    MAPPED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """FRESH: `k_pages` and `v_pages` are the step's own keys and values, a token's `k_place` and `v_place` apart; where
    they are MAPPED, tensor maps of these."""
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
    position = past + row // PACKED
    dims = tl.arange(0, PADDED)
    queries = tl.load(
        q + (token * q_token + head * q_head)[:, None] + dims[None, :],
        mask=real[:, None] & (dims < SIZE)[None, :],
        other=0.0,
    ).to(PRODUCT)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, PADDED_VALUES], tl.float32)
    # All rows see the tiles of keys in base .. whole; before and behind lie those that only some of them see.
    end = past + count
    begin = past * 0
    low = begin
    base = begin
    if window is not None:
        begin = tl.maximum(past + 1 - window, 0)
        low = begin // BLOCK * BLOCK
        base = tl.minimum(tl.cdiv(tl.maximum(end - window, 0), BLOCK), tl.cdiv(end, BLOCK)) * BLOCK
    whole = tl.maximum((past + 1) // BLOCK * BLOCK, base)
    own = first - past
    table_base = table + sequence.to(tl.int64) * table_row
    if MAPPED:
        k_base, v_base = k_pages, v_pages
    else:
        k_base = k_pages + key_head * k_page_head
        v_base = v_pages + key_head * v_page_head
        if FRESH:
            k_base += own.to(tl.int64) * k_place
            v_base += own.to(tl.int64) * v_place
    if window is not None:
        peak, total, mixed = walk(
            low,
            base,
            begin,
            end,
            queries,
            position,
            k_base,
            v_base,
            k_scales,
            v_scales,
            table_base,
            own,
            key_head,
            k_frame,
            k_place,
            v_frame,
            v_place,
            k_scale_frame,
            k_scale_place,
            k_scale_head,
            v_scale_frame,
            v_scale_place,
            v_scale_head,
            inner,
            outer,
            window,
            peak,
            total,
            mixed,
            SIZE,
            VALUES,
            PADDED,
            PADDED_VALUES,
            PAGE,
            CAPPED,
            ALIKE,
            BLOCK,
            STAGES,
            PRODUCT,
            FRESH,
            MAPPED,
            True,
        )
    peak, total, mixed = walk(
        base,
        whole,
        begin,
        end,
        queries,
        position,
        k_base,
        v_base,
        k_scales,
        v_scales,
        table_base,
        own,
        key_head,
        k_frame,
        k_place,
        v_frame,
        v_place,
        k_scale_frame,
        k_scale_place,
        k_scale_head,
        v_scale_frame,
        v_scale_place,
        v_scale_head,
        inner,
        outer,
        window,
        peak,
        total,
        mixed,
        SIZE,
        VALUES,
        PADDED,
        PADDED_VALUES,
        PAGE,
        CAPPED,
        ALIKE,
        BLOCK,
        STAGES,
        PRODUCT,
        FRESH,
        MAPPED,
        False,
    )
    peak, total, mixed = walk(
        whole,
        end,
        begin,
        end,
        queries,
        position,
        k_base,
        v_base,
        k_scales,
        v_scales,
        table_base,
        own,
        key_head,
        k_frame,
        k_place,
        v_frame,
        v_place,
        k_scale_frame,
        k_scale_place,
        k_scale_head,
        v_scale_frame,
        v_scale_place,
        v_scale_head,
        inner,
        outer,
        window,
        peak,
        total,
        mixed,
        SIZE,
        VALUES,
        PADDED,
        PADDED_VALUES,
        PAGE,
        CAPPED,
        ALIKE,
        BLOCK,
        STAGES,
        PRODUCT,
        FRESH,
        MAPPED,
        True,
    )
    store_heads(out, mixed, total, token, head, real, out_token, VALUES, PADDED_VALUES)


def tile_shape(padded: int, product_bytes: int) -> tuple[int, int, int, int]:
    """Rows of queries, keys of one step, warps, stages.

    Four warps with 64 rows: two such programs fit a multiprocessor, and one multiplies while the other is at its
    exponentials. On an H200 316 TFLOP/s for 8 x 2048 tokens, against 282 with 128 rows and eight warps.
    Products of float32 go without the matrix units: small tiles, so that they fit the registers.
    """
    if product_bytes == 4:
        return 32, 16, 8, 2
    return (64, 64, 4, 3) if padded <= 128 else (128, 32, 8, 2)


def tensor_map(rows: Tensor, block: int) -> TensorDescriptor | None:
    """Keys or values of a step, one row for each token, as tiles of `block` rows of one head; None where a map cannot
    say how they lie: it needs steps of 16 bytes, heads side by side, and a head as wide as its tile."""
    count, heads, size = rows.shape
    token, head, number = rows.stride()
    side_by_side = number == 1 and (head == size or heads == 1) and token >= heads * size
    aligned = rows.data_ptr() % 16 == 0 and token * rows.element_size() % 16 == 0
    if not side_by_side or not aligned or size != max(16, power_of_two(size)):
        return None
    return TensorDescriptor(rows, [count, heads * size], [token, 1], [block, size])


def launch_prefill(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scales: tuple[Tensor, Tensor] | None,
    table: Tensor,
    lengths: Tensor,
    tiles_of: Callable[[int], Tensor],
    out: Tensor,
    scale: float,
    window: int | None,
    cap: float | None,
) -> None:
    """Queries that are ready, in tiles of so many tokens as `tiles_of` is asked for, over pages that hold all keys and
    values; or, where these have three dimensions, over the step's own. Then the sequences of the tiles must have
    nothing before."""
    fresh = keys.dim() == 3
    heads, size = q.shape[1:]
    key_heads, numbers = values.shape[-2:]
    page = 1 if fresh else values.shape[1]
    groups = heads // key_heads
    padded, padded_values = (max(16, power_of_two(n)) for n in (size, numbers))
    rows, block, warps, stages = tile_shape(max(padded, padded_values), q.element_size())
    packed = groups if groups <= rows else 1
    tiles = tiles_of(rows // packed)
    k_scales, v_scales = scales or (None, None)
    inner, outer = score_factors(scale, cap)
    k_strides, v_strides = ((0, *part.stride()[:2]) if fresh else part.stride()[:3] for part in (keys, values))
    options = overlapped(q)
    k_map = v_map = None
    # Cards that can start a kernel early also have the engine. Other tiles were not measured with it.
    if fresh and block == 64 and (INTERPRETED or options["OVERLAP"]):
        k_map, v_map = tensor_map(keys, block), tensor_map(values, block)
    mapped = k_map is not None and v_map is not None
    attention_prefill[(len(tiles) * (heads // packed),)](
        q,
        out,
        k_map if mapped else keys,
        v_map if mapped else values,
        k_scales,
        v_scales,
        table,
        lengths,
        tiles,
        *q.stride()[:2],
        out.stride(0),
        *k_strides,
        *v_strides,
        *((0, 0, 0) if k_scales is None else k_scales.stride()),
        *((0, 0, 0) if v_scales is None else v_scales.stride()),
        table.stride(0),
        inner,
        outer,
        window,
        heads // packed,
        groups,
        packed,
        size,
        numbers,
        padded,
        padded_values,
        page,
        cap is not None,
        k_strides[:2] == v_strides[:2],
        rows,
        block,
        stages,
        multiplied_as(q),
        fresh,
        mapped,
        num_warps=warps,
        **options,
    )
