"""The keys that a tile of queries sees under a sparse mask (`state/mask.py`), as a list that needs no memory.

The keys that any of some adjacent queries sees are, in order of their positions: the global tokens, what is on the
stride before the first query's window, and the windows. Each part is a number of runs of equal length at equal
distances, so the position of the j-th key follows from j. Only listed keys are read; a page without any is not touched.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import triton
import triton.language as tl

from bankfull.ops.attention.sight import seen_by_one
from bankfull.ops.attention.triton.tile import bit_count, capped, online_softmax
from bankfull.state.mask import Mask

FAR = 1 << 30
"""Distances beyond this one are all alike: positions are smaller, and 32-bit sums of two of them do not overflow."""


class MaskNumbers(NamedTuple):
    """A mask as constants of a kernel. A dilation goes neither with a stride nor with aligned windows."""

    window: int
    dilation: int
    extent: int
    stride: int
    columns: int
    globals: int
    aligned: bool


def numbers_of(mask: Mask) -> MaskNumbers:
    stride, columns = mask.stride, mask.columns
    if stride > FAR:  # one block holds every position: what of its columns lies beyond FAR is never reached
        columns = max(0, columns - (stride - FAR))
        stride = 0 if mask.columns and not columns else FAR
    window, dilation, extent = (min(number, FAR) for number in (mask.window, mask.dilation, mask.extent))
    return MaskNumbers(window, dilation, extent, stride, columns, min(mask.global_tokens, FAR - 1), mask.aligned)


def most_listed(mask: Mask, queries: int, places: int) -> int:
    """An upper bound of the keys that a tile of adjacent queries sees in a sequence of at most `places` tokens."""
    seen = int(seen_by_one(np.array([max(places - 1, 0)]), mask)[0])
    return min(places, (seen + mask.window + mask.global_tokens) * max(queries, 1))


@triton.jit
def sight_of(first, count, end, MASK: tl.constexpr):
    """The parts of the list for queries at first .. first + count, among the keys before `end`: the number of global
    tokens; origin, run, period and number of what is on the stride; the same of the windows; the first window's start.
    """
    WINDOW: tl.constexpr = MASK[0]
    DILATION: tl.constexpr = MASK[1]
    EXTENT: tl.constexpr = MASK[2]
    STRIDE: tl.constexpr = MASK[3]
    COLUMNS: tl.constexpr = MASK[4]
    GLOBALS: tl.constexpr = MASK[5]
    ALIGNED: tl.constexpr = MASK[6]
    last = first + count - 1
    fixed = tl.minimum(end, GLOBALS)
    start = first // WINDOW * WINDOW if ALIGNED else tl.maximum(first - EXTENT + 1, 0)
    origin = start * 0
    run = origin + 1
    period = origin + 1
    strided = origin
    if STRIDE > 0:
        if COLUMNS > 0:
            run = origin + COLUMNS
            period = origin + STRIDE
            origin = origin + GLOBALS // STRIDE * STRIDE + STRIDE - COLUMNS
            before = tl.maximum(start - origin, 0)
            strided = before // STRIDE * COLUMNS + tl.minimum(before % STRIDE, COLUMNS)
        else:
            # Runs of all queries, `index` strides before them: those that reach before the window, and not only into
            # the global tokens. From STRIDE queries on, they see every key.
            near = (first - start) // STRIDE + 1
            far = tl.where(last >= GLOBALS, (last - GLOBALS) // STRIDE, 0)
            dense = count >= STRIDE
            run = tl.where(dense, 1, count)
            period = tl.where(dense, 1, STRIDE)
            origin = tl.where(dense, tl.minimum(start, GLOBALS), first - far * STRIDE)
            strided = tl.where(dense, start - origin, tl.maximum(far - near + 1, 0) * count)
    own = tl.maximum(start, GLOBALS)
    own_run = own * 0 + 1
    own_period = own_run
    local = tl.maximum(tl.minimum(last + 1, end) - own, 0)
    if DILATION > 1:
        steps = tl.where(last >= GLOBALS, tl.minimum((last - GLOBALS) // DILATION, WINDOW - 1), 0)
        apart = count < DILATION
        own = tl.where(apart, first - steps * DILATION, own)
        own_run = tl.where(apart, count, own_run)
        own_period = tl.where(apart, DILATION, own_period)
        local = tl.where(apart, tl.where(last >= GLOBALS, (steps + 1) * count, 0), local)
    return fixed, origin, run, period, strided, own, own_run, own_period, local, start


@triton.jit
def listed_keys(index, end, sight, tree_tokens, MASK: tl.constexpr):
    """Positions of the keys at these indices of the list, and whether there is such a key: runs may begin inside of the
    part before, or end beyond their own. After the list come `tree_tokens` keys from `end` on."""
    DILATION: tl.constexpr = MASK[1]
    STRIDE: tl.constexpr = MASK[3]
    GLOBALS: tl.constexpr = MASK[5]
    fixed, origin, run, period, strided, own, own_run, own_period, local, start = sight
    key = index
    there = index < fixed
    at = index - fixed
    if STRIDE > 0:
        found = origin + at // run * period + at % run
        inside = (at >= 0) & (at < strided)
        key = tl.where(inside, found, key)
        there = there | (inside & (found >= GLOBALS) & (found < start))
    at = at - strided
    found = own + at
    if DILATION > 1:
        found = own + at // own_run * own_period + at % own_run
    inside = (at >= 0) & (at < local)
    key = tl.where(inside, found, key)
    there = there | (inside & (found >= GLOBALS) & (found < end))
    at = at - local
    inside = (at >= 0) & (at < tree_tokens)
    return tl.where(inside, end + at, key), there | inside


@triton.jit
def masked_sight(position, key, MASK: tl.constexpr):
    """`Mask.visible` of every query (rows) and key (columns)."""
    WINDOW: tl.constexpr = MASK[0]
    DILATION: tl.constexpr = MASK[1]
    EXTENT: tl.constexpr = MASK[2]
    STRIDE: tl.constexpr = MASK[3]
    COLUMNS: tl.constexpr = MASK[4]
    GLOBALS: tl.constexpr = MASK[5]
    ALIGNED: tl.constexpr = MASK[6]
    key = key[None, :]
    past = position[:, None] - key
    if ALIGNED:
        seen = position[:, None] // WINDOW == key // WINDOW
    else:
        seen = past < EXTENT
        if DILATION > 1:
            seen = seen & (past % DILATION == 0)
    if STRIDE > 0:
        seen = seen | ((key % STRIDE >= STRIDE - COLUMNS) if COLUMNS > 0 else (past % STRIDE == 0))
    if GLOBALS > 0:
        seen = seen | (key < GLOBALS)
    return (past >= 0) & seen


@triton.jit
def attend_listed(
    low,
    high,
    queries,
    position,
    path,
    ancestors,
    end,
    tree_tokens,
    sight,
    k_base,
    v_base,
    k_scales,
    v_scales,
    table_base,
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
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    VALUES: tl.constexpr,
    PADDED: tl.constexpr,
    PADDED_VALUES: tl.constexpr,
    PAGE: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PRODUCT: tl.constexpr,
    MASK: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """Online softmax over the keys low .. high of the list `sight`. `path`: the mask of each query's ancestors among
    the tokens from `end` on, whose own masks are `ancestors`; None: no trees. PARTIAL: without the keys of pages whose
    entries of the table are negative."""
    dims = tl.arange(0, PADDED)
    numbers = tl.arange(0, PADDED_VALUES)
    within = tl.arange(0, BLOCK)
    factor = inner
    if CAPPED:
        factor = 1.0
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED_VALUES], tl.float32)
    for at in tl.range(low, high, BLOCK, num_stages=STAGES):
        key, there = listed_keys(at + within, end, sight, tree_tokens, MASK)
        there = there & (at + within < high)
        frame = tl.load(table_base + key // PAGE, mask=there, other=0).to(tl.int64)
        if PARTIAL:
            there = there & (frame >= 0)
        place = (key % PAGE).to(tl.int64)
        k_there = k_base + (frame * k_frame + place * k_place)[:, None] + dims[None, :]
        keys = tl.load(k_there, mask=there[:, None] & (dims < SIZE)[None, :], other=0.0)
        v_there = v_base + (frame * v_frame + place * v_place)[:, None] + numbers[None, :]
        values = tl.load(v_there, mask=there[:, None] & (numbers < VALUES)[None, :], other=0.0)
        score = tl.dot(queries, tl.trans(keys.to(PRODUCT)), input_precision="ieee")
        value_scale = None
        if k_scales is not None:
            k_scale = tl.load(k_scales + frame * k_scale_frame + place * k_scale_place, mask=there, other=0.0)
            score = score * k_scale[None, :]
            value_scale = tl.load(v_scales + frame * v_scale_frame + place * v_scale_place, mask=there, other=0.0)
        if CAPPED:
            score = capped(score, inner, outer)
        if path is not None:
            # A draft's position is that of its path, not that of its slot.
            later = there & (key >= end)
            bit = tl.minimum(tl.maximum(key - end, 0), 63)
            own_path = tl.load(ancestors + bit, mask=later, other=0)
            in_tree = (own_path != 0)[None, :] & (path != 0)[:, None]
            on_path = ((path[:, None] >> bit.to(tl.int64)[None, :]) & 1) != 0
            key = tl.where(own_path != 0, end + bit_count(own_path).to(tl.int32) - 1, key)
            seen = tl.where(in_tree, on_path, True) & there[None, :]
        else:
            seen = there[None, :]
        seen = seen & masked_sight(position, key, MASK)
        score = tl.where(seen, score, float("-inf"))
        peak, total, acc = online_softmax(score, factor, values.to(PRODUCT), value_scale, peak, total, acc, True)
    return peak, total, acc
