"""Kernels that find the cutoff of top-k and top-p: steps 3 to 5 of `sampling_kernels`."""

from __future__ import annotations

import triton
import triton.language as tl

from bankfull.ops.sampling.triton.numbers import FAR, distance_of, key_of, least_reaching, strength_of, weight_of
from bankfull.ops.sampling.triton.state import (
    AT_CUT,
    AT_FIRST,
    AT_FOUND,
    AT_GOAL,
    AT_LAST,
    AT_RANK,
    AT_ROOM,
    AT_SCALE,
    AT_STATE,
    AT_TEMPERATURE,
    AT_TOP,
    BINS,
    CUT_KNOWN,
    SEARCHING,
    SHAPE,
    STATUS,
    TOP_K,
    TOP_P,
    bin_of,
    block_distances,
)
from bankfull.ops.triton.launch import start_next, wait_for_inputs


@triton.jit
def bracket_kernel(own, passes, SIZE: tl.constexpr, OVERLAP: tl.constexpr):
    line = tl.program_id(0).to(tl.int64)
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    status = passes.status + line * STATUS
    if tl.load(status + AT_STATE) == SEARCHING:
        row = tl.load(own.rows + line)
        top_k = tl.load(own.wholes + row * own.wholes_stride + TOP_K)
        top_p = tl.load(own.reals + row * own.reals_stride + TOP_P)
        at = tl.arange(0, SIZE.width)
        total = tl.sum(tl.load(passes.weights + line * SIZE.blocks + at, mask=at < SIZE.blocks, other=0), 0)
        counted = _line_bins(passes.bins, line, SIZE)
        if top_k < tl.sum(counted, 0):
            # top_p applies to the tokens left by top-k, so all of them are collected; without top_p, one bin suffices.
            last = tl.sum((tl.cumsum(counted, 0) < top_k).to(tl.int32), 0)
            tl.store(status + AT_FIRST, tl.where(top_p < 1.0, 0, last).to(tl.int64))
            tl.store(status + AT_LAST, last.to(tl.int64))
            tl.store(status + AT_RANK, top_k)
        elif top_p < 1.0:
            share = top_p * total.to(tl.float64)
            scale = tl.load(passes.shape + line * SHAPE + AT_SCALE)
            first, last = _share_bins(counted, total.to(tl.float64), share, scale)
            tl.store(status + AT_FIRST, first.to(tl.int64))
            tl.store(status + AT_LAST, last.to(tl.int64))
            tl.store(status + AT_RANK, line * 0)
            tl.store(status + AT_GOAL, least_reaching(share))
        else:
            tl.store(status + AT_STATE, line * 0 + CUT_KNOWN)  # all tokens beyond top-k have zero weight


@triton.jit
def _line_bins(bins, line, SIZE: tl.constexpr):
    """The histogram of a row: 32 blocks per load, to share the latency."""
    ROWS: tl.constexpr = 32
    column = tl.arange(0, BINS)
    counted = tl.zeros((BINS,), tl.int32)
    for start in range(0, SIZE.blocks, ROWS):
        block = start + tl.arange(0, ROWS)
        at = bins + (line * SIZE.blocks + block)[:, None] * BINS + column[None, :]
        counted += tl.sum(tl.load(at, mask=(block < SIZE.blocks)[:, None], other=0), 0)
    return counted


@triton.jit
def _share_bins(counted, total, share, scale):
    """The first and the last bin in which the cumulative weight of the best tokens may reach `share`.

    A bin's weight lies between its count times the weights at its two ends. That bounds the cumulative weight from the
    best token and, since the total is known, from the worst one; the tighter bound is used.
    """
    number = tl.arange(0, BINS)
    near = number.to(tl.float32) / scale
    most = counted.to(tl.float64) * (strength_of(near) * 1.001).to(tl.float64)
    farthest = tl.where(number == BINS - 1, 0.0, strength_of(near + 1.0 / scale) * 0.999)
    least = counted.to(tl.float64) * farthest.to(tl.float64)
    most_through = tl.cumsum(most, 0)
    least_through = tl.cumsum(least, 0)
    most_after = tl.sum(most, 0) - most_through
    least_from = tl.sum(least, 0) - least_through + least
    rounding = total * 1e-12
    before = tl.minimum(most_through - most, total - least_from) + rounding
    through = tl.maximum(least_through, total - most_after) - rounding
    first = tl.max(tl.where(before < share, number, 0), 0)
    last = tl.min(tl.where(through >= share, number, BINS - 1), 0)
    return first, last


@triton.jit
def collect_kernel(own, passes, SIZE: tl.constexpr, OVERLAP: tl.constexpr):
    """Unordered: the search only counts and sums. Tokens beyond SIZE.room are counted, but not stored."""
    program = tl.program_id(0).to(tl.int64)
    line, block = program // SIZE.blocks, program % SIZE.blocks
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    status = passes.status + line * STATUS
    if tl.load(status + AT_STATE) == SEARCHING:
        first, last = tl.load(status + AT_FIRST), tl.load(status + AT_LAST)
        distance = block_distances(own, passes.shape, line, block, SIZE)
        weight = weight_of(distance)
        number = bin_of(distance, tl.load(passes.shape + line * SHAPE + AT_SCALE))
        above = (number < first) & (weight > 0)
        tl.store(passes.weights + program, tl.sum(tl.where(above, weight, 0), 0))
        tl.store(passes.counts + program, tl.sum(above.to(tl.int32), 0))
        between = (number >= first) & (number <= last) & (weight > 0)
        many = tl.sum(between.to(tl.int32), 0)
        if many > 0:
            start = tl.atomic_add(status + AT_FOUND, many.to(tl.int64))
            place = start + tl.cumsum(between.to(tl.int32), 0) - 1
            tl.store(passes.found_keys + line * SIZE.room + place, key_of(distance), mask=between & (place < SIZE.room))


@triton.jit
def _candidate_keys(start, candidates, TILE: tl.constexpr):
    """The keys of a tile of candidates, from the list or, if it overflowed, from the scores of all tokens."""
    extent, listed, keys, scores, top, temperature = candidates
    at = start + tl.arange(0, TILE)
    if listed:
        found = tl.load(keys + at, mask=at < extent, other=FAR)
    else:
        raw = tl.load(scores + at, mask=at < extent, other=-float("inf")).to(tl.float32)
        found = key_of(distance_of(raw, top, temperature))
    return found


@triton.jit
def _range_of_keys(candidates, TILE: tl.constexpr):
    nearest = tl.full((TILE,), FAR, tl.int32)
    farthest = tl.zeros((TILE,), tl.int32)
    start = 0
    while start < candidates[0]:
        keys = _candidate_keys(start, candidates, TILE)
        nearest = tl.minimum(nearest, keys)
        farthest = tl.maximum(farthest, tl.where(keys < FAR, keys, 0))
        start += TILE
    return tl.min(nearest, 0), tl.max(farthest, 0)


@triton.jit
def _up_to(limits, candidates, WAYS: tl.constexpr, TILE: tl.constexpr):
    """The number of candidates with a key of at most each limit, and their weight."""
    count = tl.zeros((WAYS, TILE), tl.int32)
    weight = tl.zeros((WAYS, TILE), tl.int64)
    start = 0
    while start < candidates[0]:
        keys = _candidate_keys(start, candidates, TILE)
        each = weight_of(keys.to(tl.float32, bitcast=True))
        counts = keys[None, :] <= limits[:, None]
        count += counts.to(tl.int32)
        weight += tl.where(counts, each[None, :], 0)
        start += TILE
    return tl.sum(count, 1), tl.sum(weight, 1)


@triton.jit
def _cut_at(goal, low, high, candidates, BY_WEIGHT: tl.constexpr, WAYS: tl.constexpr, TILE: tl.constexpr):
    """The smallest key at which the candidates reach `goal` in count or weight, at most `high`; with the count and
    weight
    below it. Latency of the reductions dominates, so each round tests WAYS limits."""
    count_before = goal * 0
    weight_before = goal * 0
    way = tl.arange(0, WAYS)
    while low < high:
        limits = low + ((high - low).to(tl.int64) * way // WAYS).to(tl.int32)
        count, weight = _up_to(limits, candidates, WAYS, TILE)
        short = (weight if BY_WEIGHT else count.to(tl.int64)) < goal
        # Limits and sums ascend together: limits below the goal come first, and the last of them is the nearest.
        count_before = tl.maximum(count_before, tl.max(tl.where(short, count, 0), 0))
        weight_before = tl.maximum(weight_before, tl.max(tl.where(short, weight, 0), 0))
        low = tl.max(tl.where(short, limits + 1, low), 0)
        high = tl.min(tl.where(short, high, limits), 0)
    return low, count_before, weight_before


@triton.jit
def cut_kernel(own, passes, SIZE: tl.constexpr, WAYS: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr):
    line = tl.program_id(0).to(tl.int64)
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    status = passes.status + line * STATUS
    if tl.load(status + AT_STATE) == SEARCHING:
        top_p = tl.load(own.reals + tl.load(own.rows + line) * own.reals_stride + TOP_P)
        at = tl.arange(0, SIZE.width)
        found = tl.load(status + AT_FOUND)
        listed = found <= SIZE.room
        above = (at < SIZE.blocks) & listed
        weight_above = tl.sum(tl.load(passes.weights + line * SIZE.blocks + at, mask=above, other=0), 0)
        count_above = tl.sum(tl.load(passes.counts + line * SIZE.blocks + at, mask=above, other=0), 0)
        candidates = (
            tl.where(listed, found, SIZE.vocab).to(tl.int32),
            listed,
            passes.found_keys + line * SIZE.room,
            own.scores + line * own.stride,
            tl.load(passes.shape + line * SHAPE + AT_TOP),
            tl.load(passes.shape + line * SHAPE + AT_TEMPERATURE),
        )
        low, high = _range_of_keys(candidates, TILE)
        rank = tl.load(status + AT_RANK)
        if rank > 0:
            rank -= count_above
            high, count, weight = _cut_at(rank, low, high, candidates, False, WAYS, TILE)
            room = rank - count
            inside = weight_above + weight + room * weight_of(high.to(tl.float32, bitcast=True))
            goal = least_reaching(top_p * inside.to(tl.float64))
        else:
            room = rank
            goal = tl.load(status + AT_GOAL)
        if top_p < 1.0:
            goal -= weight_above
            high, count, weight = _cut_at(goal, low, high, candidates, True, WAYS, TILE)
            each = weight_of(high.to(tl.float32, bitcast=True))
            room = (goal - weight + each - 1) // each
        tl.store(status + AT_CUT, high.to(tl.int64))
        tl.store(status + AT_ROOM, room)
