"""Attention of sequences with many new tokens: flash attention with a tile of queries per program, bound by GEMM.

A tile holds adjacent tokens with all query heads of one KV head, so that loaded keys and values serve them all. The
host computes the list of tiles and copies it as one small array.

Sequences without a past have all keys and values in the step's own rows. Reading these instead of pages avoids page
table lookups and takes a fifth less time. If a tensor map can describe their layout, the TMA unit loads them tile by
tile, without address computation in the threads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bankfull.ops.attention.triton.tile import capped, load_frames, load_pairs, offsets, online_softmax, store_heads
from bankfull.ops.triton.launch import start_next, wait_for_inputs


@triton.jit
def attend_keys(
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
    acc,
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
    GROUP: tl.constexpr,
    BORDER: tl.constexpr,
):
    """Online softmax over the keys low .. high. BORDER: some queries do not see all of these keys, and only keys in
    begin .. end may be read. `window`: of all queries, or one of each. ALIKE: keys and values have the same strides.
    FRESH: no pages; the first key is at the base pointer, or, if the bases are MAPPED, in row `own` of the tensor maps.
    GROUP: as in `attention_decode`."""
    dims = tl.arange(0, PADDED // 2 if GROUP else PADDED)
    numbers = tl.arange(0, PADDED_VALUES // 2 if GROUP else PADDED_VALUES)
    within = tl.arange(0, BLOCK)
    factor = inner
    if CAPPED:
        factor = 1.0
    # Page frames are loaded one iteration ahead, so that no load in the loop depends on another.
    frames = within
    if not FRESH:
        frames = load_frames(table_base, low, begin, tl.minimum(high, end), PAGE, BLOCK)
    # A border has one or two tiles, and its masked values need extra shared memory: two programs must fit per SM.
    DEPTH: tl.constexpr = 2 if MAPPED and BORDER else STAGES
    for at in tl.range(low, high, BLOCK, num_stages=DEPTH):
        key = at + within
        inside = (key >= begin) & (key < end)
        if MAPPED:
            keys = k_base.load([own + at, key_head * SIZE])
            values = v_base.load([own + at, key_head * VALUES])
            if BORDER:
                # Rows of another sequence have weight 0, but 0 times a non-finite value would be NaN.
                values = tl.where(inside[:, None], values, 0.0)
        else:
            if FRESH:
                before = (begin * 0 + at).to(tl.int64)  # in the interpreter `at` is an untyped number
                k_there = k_base + before * k_place + (within[:, None] * k_place + dims[None, :])
                v_there = v_base + before * v_place + (within[:, None] * v_place + numbers[None, :])
            else:
                k_places = offsets(frames, at, k_frame, k_place, PAGE, BLOCK)
                v_places = k_places if ALIKE else offsets(frames, at, v_frame, v_place, PAGE, BLOCK)
                k_there = k_base + k_places[:, None] + dims[None, :]
                v_there = v_base + v_places[:, None] + numbers[None, :]
            if GROUP:
                k_places = offsets(frames, at, k_scale_frame, k_scale_place, PAGE, BLOCK) + key_head * k_scale_head
                v_places = offsets(frames, at, v_scale_frame, v_scale_place, PAGE, BLOCK) + key_head * v_scale_head
                keys = load_pairs(k_there, k_scales, k_places, inside, SIZE, PADDED, GROUP, BLOCK, PRODUCT)
                values = load_pairs(v_there, v_scales, v_places, inside, VALUES, PADDED_VALUES, GROUP, BLOCK, PRODUCT)
            elif BORDER:
                keys = tl.load(k_there, mask=inside[:, None] & (dims < SIZE)[None, :], other=0.0)
                values = tl.load(v_there, mask=inside[:, None] & (numbers < VALUES)[None, :], other=0.0)
            else:
                keys = tl.load(k_there) if SIZE == PADDED else tl.load(k_there, mask=(dims < SIZE)[None, :], other=0.0)
                ragged = (numbers < VALUES)[None, :]
                values = tl.load(v_there) if VALUES == PADDED_VALUES else tl.load(v_there, mask=ragged, other=0.0)
        score = tl.dot(queries, tl.trans(keys.to(PRODUCT)), input_precision="ieee")
        value_scale = None
        if k_scales is not None and GROUP == 0:
            scales = k_scales + key_head * k_scale_head + offsets(frames, at, k_scale_frame, k_scale_place, PAGE, BLOCK)
            score = score * tl.load(scales, mask=inside, other=0.0)[None, :]
            scales = v_scales + key_head * v_scale_head + offsets(frames, at, v_scale_frame, v_scale_place, PAGE, BLOCK)
            value_scale = tl.load(scales, mask=inside, other=0.0)
        if CAPPED:
            score = capped(score, inner, outer)
        if BORDER:
            seen = inside[None, :] & (key[None, :] <= position[:, None])
            if window is not None:
                seen = seen & (key[None, :] > (position - window)[:, None])
            score = tl.where(seen, score, float("-inf"))
        if not FRESH:
            frames = load_frames(table_base, at + BLOCK, begin, tl.minimum(high, end), PAGE, BLOCK)
        peak, total, acc = online_softmax(score, factor, values.to(PRODUCT), value_scale, peak, total, acc, BORDER)
    return peak, total, acc


@triton.jit(do_not_specialize=["table_row", "window", "sight"])
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
    begins,
    ends,
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
    window,
    sight,
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
    GROUP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """FRESH: `k_pages` and `v_pages` are the step's own keys and values with token strides `k_place` and `v_place`, or
    tensor maps of them if MAPPED. `sight`: tokens of a block that see each other (`PagedMeta.block`); None: causal.
    `ends`: the attention is partial, over keys that `attention_held` has counted."""
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    tile = tiles + tl.program_id(0) // HEAD_TILES * 4
    sequence = tl.load(tile)
    first = tl.load(tile + 1)
    count = tl.load(tile + 2)
    length = tl.load(lengths + sequence)
    past = length - tl.load(tile + 3)
    first_head = tl.program_id(0) % HEAD_TILES * PACKED
    key_head = first_head // GROUPS
    row = tl.arange(0, ROWS)
    real = row < count * PACKED
    token = (first + row // PACKED).to(tl.int64)
    head = first_head + row % PACKED
    position = past + row // PACKED  # the last one that each row sees
    dims = tl.arange(0, PADDED)
    queries = tl.load(
        q + (token * q_token + head * q_head)[:, None] + dims[None, :],
        mask=real[:, None] & (dims < SIZE)[None, :],
        other=0.0,
    ).to(PRODUCT)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED_VALUES], tl.float32)
    # All rows see the key tiles in base .. whole; the tiles before and after are visible to some rows only.
    end = past + count
    seen_by_all = past + 1
    if sight is not None:
        position = tl.minimum((position // sight + 1) * sight, length) - 1
        end = tl.minimum(((end - 1) // sight + 1) * sight, length)
        seen_by_all = tl.minimum((past // sight + 1) * sight, length)
    begin = past * 0
    low = begin
    base = begin
    reach = window
    if window is not None:
        begin = tl.maximum(past + 1 - window, 0)
        base = tl.maximum(end - window, 0)
    if ends is not None:
        position = tl.load(ends + token, mask=real, other=0) - 1
        end = tl.load(ends + first + count - 1)
        seen_by_all = tl.load(ends + first)
        if begins is not None:
            reach = position + 1 - tl.load(begins + token, mask=real, other=0)
            begin = tl.load(begins + first)
            base = tl.load(begins + first + count - 1)
    if reach is not None:
        low = begin // BLOCK * BLOCK
        base = tl.minimum(tl.cdiv(base, BLOCK), tl.cdiv(end, BLOCK)) * BLOCK
    whole = tl.maximum(seen_by_all // BLOCK * BLOCK, base)
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
    if reach is not None:
        peak, total, acc = attend_keys(
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
            reach,
            peak,
            total,
            acc,
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
            GROUP,
            True,
        )
    peak, total, acc = attend_keys(
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
        reach,
        peak,
        total,
        acc,
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
        GROUP,
        False,
    )
    peak, total, acc = attend_keys(
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
        reach,
        peak,
        total,
        acc,
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
        GROUP,
        True,
    )
    store_heads(out, acc, peak, total, sinks, token, head, real, out_token, VALUES, PADDED_VALUES, ends is not None)
