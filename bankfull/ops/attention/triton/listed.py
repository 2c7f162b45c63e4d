"""The keys that a tile of queries sees under a sparse mask (`state/mask.py`), as a list that needs no memory.

The keys that any of some adjacent queries sees are, in order of their positions: the global tokens, what is on the
stride before the first query's window, and the windows. Each part is a number of runs of equal length at equal
distances, so the position of the j-th key follows from j. Only listed keys are read; a page without any is not touched.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import triton
import triton.language as tl

from bankfull.ops.attention.sight import seen_by_one
from bankfull.ops.attention.triton.tile import Softmax, bit_count, capped, no_keys, online_softmax
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


class KeyList(NamedTuple):
    """The parts of the list, in a kernel: each has a number of keys, in runs at a distance (the period)."""

    fixed: Any
    """Global tokens."""
    origin: Any
    run: Any
    period: Any
    strided: Any
    """Keys on the stride before the first window."""
    own: Any
    own_run: Any
    own_period: Any
    local: Any
    """Keys of the windows."""
    start: Any
    """The start of the first window."""
    end: Any
    """The end of the keys in the list, from which the tokens of a tree follow."""
    keys: Any
    """Their number, with those of the tree."""
    tree_tokens: Any


@triton.jit
def key_list(first, queries, end, tree_tokens, TILE: tl.constexpr):
    """The list for some queries from `first` on, among the keys before `end`; without queries, it has no keys."""
    MASK: tl.constexpr = TILE.mask
    count = tl.maximum(queries, 1)
    last = first + count - 1
    fixed = tl.minimum(end, MASK.globals)
    start = first // MASK.window * MASK.window if MASK.aligned else tl.maximum(first - MASK.extent + 1, 0)
    origin = start * 0
    run = origin + 1
    period = origin + 1
    strided = origin
    if MASK.stride > 0:
        if MASK.columns > 0:
            run = origin + MASK.columns
            period = origin + MASK.stride
            origin = origin + MASK.globals // MASK.stride * MASK.stride + MASK.stride - MASK.columns
            before = tl.maximum(start - origin, 0)
            strided = before // MASK.stride * MASK.columns + tl.minimum(before % MASK.stride, MASK.columns)
        else:
            # Runs of all queries, `index` strides before them: those that reach before the window, and not only into
            # the global tokens. From `stride` queries on, they see every key.
            near = (first - start) // MASK.stride + 1
            far = tl.where(last >= MASK.globals, (last - MASK.globals) // MASK.stride, 0)
            dense = count >= MASK.stride
            run = tl.where(dense, 1, count)
            period = tl.where(dense, 1, MASK.stride)
            origin = tl.where(dense, tl.minimum(start, MASK.globals), first - far * MASK.stride)
            strided = tl.where(dense, start - origin, tl.maximum(far - near + 1, 0) * count)
    own = tl.maximum(start, MASK.globals)
    own_run = own * 0 + 1
    own_period = own_run
    local = tl.maximum(tl.minimum(last + 1, end) - own, 0)
    if MASK.dilation > 1:
        steps = tl.where(last >= MASK.globals, tl.minimum((last - MASK.globals) // MASK.dilation, MASK.window - 1), 0)
        apart = count < MASK.dilation
        own = tl.where(apart, first - steps * MASK.dilation, own)
        own_run = tl.where(apart, count, own_run)
        own_period = tl.where(apart, MASK.dilation, own_period)
        local = tl.where(apart, tl.where(last >= MASK.globals, (steps + 1) * count, 0), local)
    keys = tl.where(queries > 0, fixed + strided + local + tree_tokens, 0)
    parts = origin, run, period, strided, own, own_run, own_period, local, start
    return KeyList(fixed, *parts, end, keys, tree_tokens)


@triton.jit
def listed_keys(index, listed, TILE: tl.constexpr):
    """Positions of the keys at these indices of the list, and whether there is such a key: runs may begin inside of the
    part before, or end beyond their own. The keys of a tree come last."""
    MASK: tl.constexpr = TILE.mask
    key = index
    there = index < listed.fixed
    at = index - listed.fixed
    if MASK.stride > 0:
        found = listed.origin + at // listed.run * listed.period + at % listed.run
        inside = (at >= 0) & (at < listed.strided)
        key = tl.where(inside, found, key)
        there = there | (inside & (found >= MASK.globals) & (found < listed.start))
    at = at - listed.strided
    found = listed.own + at
    if MASK.dilation > 1:
        found = listed.own + at // listed.own_run * listed.own_period + at % listed.own_run
    inside = (at >= 0) & (at < listed.local)
    key = tl.where(inside, found, key)
    there = there | (inside & (found >= MASK.globals) & (found < listed.end))
    at = at - listed.local
    inside = (at >= 0) & (at < listed.tree_tokens)
    return tl.where(inside, listed.end + at, key), there | inside


@triton.jit
def masked_sight(position, key, TILE: tl.constexpr):
    """`Mask.visible` of every query (rows) and key (columns)."""
    MASK: tl.constexpr = TILE.mask
    key = key[None, :]
    past = position[:, None] - key
    if MASK.aligned:
        seen = position[:, None] // MASK.window == key // MASK.window
    else:
        seen = past < MASK.extent
        if MASK.dilation > 1:
            seen = seen & (past % MASK.dilation == 0)
    if MASK.stride > 0:
        on_stride = (key % MASK.stride >= MASK.stride - MASK.columns) if MASK.columns > 0 else (past % MASK.stride == 0)
        seen = seen | on_stride
    if MASK.globals > 0:
        seen = seen | (key < MASK.globals)
    return (past >= 0) & seen


@triton.jit
def attend_listed(
    low, high, queries, position, path, ancestors, listed, cache, key_head, table_base, scores, TILE: tl.constexpr
):
    """Online softmax over the keys low .. high of the list. `path`: the mask of each query's ancestors among the tokens
    of the tree, whose own masks are `ancestors`; None: no trees. Partial attention is without the keys of pages whose
    entries of the table are negative."""
    k_pages, v_pages = cache
    dims = tl.arange(0, TILE.padded)
    numbers = tl.arange(0, TILE.padded_values)
    within = tl.arange(0, TILE.block)
    k_base = k_pages.at + key_head * k_pages.head
    v_base = v_pages.at + key_head * v_pages.head
    factor = scores.inner
    if TILE.capped:
        factor = 1.0
    peak, total, acc = no_keys(TILE)
    for at in tl.range(low, high, TILE.block, num_stages=TILE.stages):
        key, there = listed_keys(at + within, listed, TILE)
        there = there & (at + within < high)
        frame = tl.load(table_base + key // TILE.page, mask=there, other=0).to(tl.int64)
        if TILE.partial:
            there = there & (frame >= 0)
        place = (key % TILE.page).to(tl.int64)
        k_there = k_base + (frame * k_pages.frame + place * k_pages.place)[:, None] + dims[None, :]
        keys = tl.load(k_there, mask=there[:, None] & (dims < TILE.size)[None, :], other=0.0)
        v_there = v_base + (frame * v_pages.frame + place * v_pages.place)[:, None] + numbers[None, :]
        values = tl.load(v_there, mask=there[:, None] & (numbers < TILE.values)[None, :], other=0.0)
        score = tl.dot(queries, tl.trans(keys.to(TILE.product)), input_precision="ieee")
        value_scale = None
        if k_pages.scales is not None:
            k_scales = k_pages.scales + key_head * k_pages.scale_head
            k_scales += frame * k_pages.scale_frame + place * k_pages.scale_place
            v_scales = v_pages.scales + key_head * v_pages.scale_head
            v_scales += frame * v_pages.scale_frame + place * v_pages.scale_place
            score = score * tl.load(k_scales, mask=there, other=0.0)[None, :]
            value_scale = tl.load(v_scales, mask=there, other=0.0)
        if TILE.capped:
            score = capped(score, scores)
        if path is not None:
            # A draft's position is that of its path, not that of its slot.
            later = there & (key >= listed.end)
            bit = tl.minimum(tl.maximum(key - listed.end, 0), 63)
            own_path = tl.load(ancestors + bit, mask=later, other=0)
            in_tree = (own_path != 0)[None, :] & (path != 0)[:, None]
            on_path = ((path[:, None] >> bit.to(tl.int64)[None, :]) & 1) != 0
            key = tl.where(own_path != 0, listed.end + bit_count(own_path).to(tl.int32) - 1, key)
            seen = tl.where(in_tree, on_path, True) & there[None, :]
        else:
            seen = there[None, :]
        seen = seen & masked_sight(position, key, TILE)
        score = tl.where(seen, score, float("-inf"))
        peak, total, acc = online_softmax(score, factor, values.to(TILE.product), value_scale, peak, total, acc, True)
    return Softmax(peak, total, acc)
