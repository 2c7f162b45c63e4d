"""Attention of sequences with many new tokens: flash attention with a tile of queries per program, bound by GEMM.

A tile holds adjacent tokens with all query heads of one KV head, so that loaded keys and values serve them all. The
host computes the list of tiles and copies it as one small array.

Sequences without a past have all keys and values in the step's own rows. Reading these instead of pages avoids page
table lookups and takes a fifth less time. If a tensor map can describe their layout, the TMA unit loads them tile by
tile, without address computation in the threads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from bankfull.ops.attention.triton.listed import attend_listed, key_list
from bankfull.ops.attention.triton.tile import (
    QueryRows,
    Softmax,
    capped,
    load_frames,
    load_pairs,
    no_keys,
    offsets,
    online_softmax,
    scale_places,
    store_heads,
)
from bankfull.ops.triton.launch import start_next, wait_for_inputs


class RowSight(NamedTuple):
    """What the rows of a tile see, in a kernel."""

    begin: Any
    end: Any
    """Only keys in begin .. end may be read."""
    position: Any
    """The last key that each row sees."""
    window: Any
    """The window of all rows, or of each."""


@triton.jit
def attend_keys(
    low,
    high,
    reach,
    queries,
    bases,
    cache,
    table_base,
    own,
    key_head,
    scores,
    softmax,
    TILE: tl.constexpr,
    BORDER: tl.constexpr,
):
    """Online softmax over the keys low .. high. BORDER: some queries do not see all of these keys. `bases`: pointers
    to the first key and value of the KV head; if they are mapped, tensor maps, where the first key is in row `own`."""
    begin, end, position, window = reach
    k_base, v_base = bases
    k_pages, v_pages = cache
    peak, total, acc = softmax
    GROUP: tl.constexpr = TILE.group
    FRESH: tl.constexpr = TILE.fresh
    SIZE: tl.constexpr = TILE.size
    VALUES: tl.constexpr = TILE.values
    PADDED: tl.constexpr = TILE.padded
    PADDED_VALUES: tl.constexpr = TILE.padded_values
    dims = tl.arange(0, PADDED // 2 if GROUP else PADDED)
    numbers = tl.arange(0, PADDED_VALUES // 2 if GROUP else PADDED_VALUES)
    within = tl.arange(0, TILE.block)
    factor = scores.inner
    if TILE.capped:
        factor = 1.0
    # Page frames are loaded one iteration ahead, so that no load in the loop depends on another.
    frames = within
    if not FRESH:
        frames = load_frames(table_base, low, begin, tl.minimum(high, end), TILE)
    # A border has one or two tiles, and its masked values need extra shared memory: two programs must fit per SM.
    DEPTH: tl.constexpr = 2 if TILE.mapped and BORDER else TILE.stages
    for at in tl.range(low, high, TILE.block, num_stages=DEPTH):
        key = at + within
        inside = (key >= begin) & (key < end)
        if TILE.mapped:
            keys = k_base.load([own + at, key_head * SIZE])
            values = v_base.load([own + at, key_head * VALUES])
            if BORDER:
                # Rows of another sequence have weight 0, but 0 times a non-finite value would be NaN.
                values = tl.where(inside[:, None], values, 0.0)
        else:
            if FRESH:
                before = (begin * 0 + at).to(tl.int64)  # in the interpreter `at` is an untyped number
                k_there = k_base + before * k_pages.place + (within[:, None] * k_pages.place + dims[None, :])
                v_there = v_base + before * v_pages.place + (within[:, None] * v_pages.place + numbers[None, :])
            else:
                k_places = offsets(frames, at, k_pages.frame, k_pages.place, TILE)
                v_places = k_places if TILE.alike else offsets(frames, at, v_pages.frame, v_pages.place, TILE)
                k_there = k_base + k_places[:, None] + dims[None, :]
                v_there = v_base + v_places[:, None] + numbers[None, :]
            if GROUP:
                k_scales = scale_places(frames, at, key_head, k_pages, TILE)
                v_scales = scale_places(frames, at, key_head, v_pages, TILE)
                keys = load_pairs(k_there, k_scales, inside, SIZE, PADDED, TILE)
                values = load_pairs(v_there, v_scales, inside, VALUES, PADDED_VALUES, TILE)
            elif BORDER:
                keys = tl.load(k_there, mask=inside[:, None] & (dims < SIZE)[None, :], other=0.0)
                values = tl.load(v_there, mask=inside[:, None] & (numbers < VALUES)[None, :], other=0.0)
            else:
                keys = tl.load(k_there) if SIZE == PADDED else tl.load(k_there, mask=(dims < SIZE)[None, :], other=0.0)
                ragged = (numbers < VALUES)[None, :]
                values = tl.load(v_there) if VALUES == PADDED_VALUES else tl.load(v_there, mask=ragged, other=0.0)
        score = tl.dot(queries, tl.trans(keys.to(TILE.product)), input_precision="ieee")
        value_scale = None
        if k_pages.scales is not None and GROUP == 0:
            k_scales = scale_places(frames, at, key_head, k_pages, TILE)
            score = score * tl.load(k_scales, mask=inside, other=0.0)[None, :]
            value_scale = tl.load(scale_places(frames, at, key_head, v_pages, TILE), mask=inside, other=0.0)
        if TILE.capped:
            score = capped(score, scores)
        if BORDER:
            seen = inside[None, :] & (key[None, :] <= position[:, None])
            if window is not None:
                seen = seen & (key[None, :] > (position - window)[:, None])
            score = tl.where(seen, score, float("-inf"))
        if not FRESH:
            frames = load_frames(table_base, at + TILE.block, begin, tl.minimum(high, end), TILE)
        peak, total, acc = online_softmax(score, factor, values.to(TILE.product), value_scale, peak, total, acc, BORDER)
    return Softmax(peak, total, acc)


@triton.jit(do_not_specialize=["table_row", "window", "sight"])
def attention_prefill(
    q, out, cache, k_map, v_map, sequences, scores, table_row, window, sight, TILE: tl.constexpr, OVERLAP: tl.constexpr
):
    """`k_map`, `v_map`: tensor maps of the step's own keys and values. `sight`: tokens of a block that see each other
    (`PagedMeta.block`); None: causal. An empty tile of a captured step stores nothing."""
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    tile = sequences.tiles + tl.program_id(0) // TILE.head_tiles * 4
    sequence = tl.load(tile)
    first = tl.load(tile + 1)
    count = tl.load(tile + 2)
    length = tl.load(sequences.lengths + sequence)
    past = length - tl.load(tile + 3)
    first_head = tl.program_id(0) % TILE.head_tiles * TILE.packed
    key_head = first_head // TILE.groups
    row = tl.arange(0, TILE.rows)
    real = row < count * TILE.packed
    token = (first + row // TILE.packed).to(tl.int64)
    head = first_head + row % TILE.packed
    position = past + row // TILE.packed  # the last one that each row sees
    dims = tl.arange(0, TILE.padded)
    places = q.at + (token * q.token + head * q.head)[:, None] + dims[None, :]
    queries = tl.load(places, mask=real[:, None] & (dims < TILE.size)[None, :], other=0.0).to(TILE.product)
    end = past + count
    table_base = sequences.table + sequence.to(tl.int64) * table_row
    if TILE.mask is not None:
        low = count * 0
        listed = key_list(past, count, end, low, TILE)
        softmax = attend_listed(
            low, listed.keys, queries, position, None, None, listed, cache, key_head, table_base, scores, TILE
        )
    else:
        # All rows see the key tiles in base .. whole; the tiles before and after are visible to some rows only.
        seen_by_all = past + 1
        if sight is not None:
            position = tl.minimum((position // sight + 1) * sight, length) - 1
            end = tl.minimum(((end - 1) // sight + 1) * sight, length)
            seen_by_all = tl.minimum((past // sight + 1) * sight, length)
        begin = past * 0
        low = begin
        base = begin
        if window is not None:
            begin = tl.maximum(past + 1 - window, 0)
            base = tl.maximum(end - window, 0)
        if sequences.ends is not None:
            position = tl.load(sequences.ends + token, mask=real, other=0) - 1
            end = tl.load(sequences.ends + first + count - 1)
            seen_by_all = tl.load(sequences.ends + first)
            if sequences.begins is not None:
                window = position + 1 - tl.load(sequences.begins + token, mask=real, other=0)
                begin = tl.load(sequences.begins + first)
                base = tl.load(sequences.begins + first + count - 1)
        if window is not None:
            low = begin // TILE.block * TILE.block
            base = tl.minimum(tl.cdiv(base, TILE.block), tl.cdiv(end, TILE.block)) * TILE.block
        whole = tl.maximum(seen_by_all // TILE.block * TILE.block, base)
        own = first - past
        if TILE.mapped:
            bases = k_map, v_map
        else:
            k_pages, v_pages = cache
            k_base = k_pages.at + key_head * k_pages.head
            v_base = v_pages.at + key_head * v_pages.head
            if TILE.fresh:
                k_base += own.to(tl.int64) * k_pages.place
                v_base += own.to(tl.int64) * v_pages.place
            bases = k_base, v_base
        reach = RowSight(begin, end, position, window)
        softmax = no_keys(TILE)
        if window is not None:
            softmax = attend_keys(
                low, base, reach, queries, bases, cache, table_base, own, key_head, scores, softmax, TILE, True
            )
        softmax = attend_keys(
            base, whole, reach, queries, bases, cache, table_base, own, key_head, scores, softmax, TILE, False
        )
        softmax = attend_keys(
            whole, end, reach, queries, bases, cache, table_base, own, key_head, scores, softmax, TILE, True
        )
    store_heads(out, softmax, scores, QueryRows(token, head, real), TILE)
