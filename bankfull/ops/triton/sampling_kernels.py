"""From scores to tokens without sorting: passes over blocks of the vocabulary, and between them programs per line.

1. `block_tops`, `line_tops`: the highest score and its token. A greedy line ends here.
2. `weigh`: the weight of each block; for lines that truncate also a histogram of distances.
3. `bracket`: from the histogram, the few bins between which the cut must lie.
4. `collect`: the tokens of these bins, as keys, and what lies above them.
5. `cut`: the exact place of the cut, by bisection over the keys that were collected.
6. `weigh_kept`: the weight that the cut leaves in each block.
7. `pick`: the block, and in it the token, at which the random number points.

A line skips what it does not need by its own state, so launches are the same whatever lines want. All that decides is
compared exactly or is a sum of integers: neither the size of blocks nor other lines show in a result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bankfull.ops.triton.launch import start_next, wait_for_inputs
from bankfull.ops.triton.sampling_numbers import (
    FAR,
    REACH,
    distance_of,
    key_of,
    least_reaching,
    strength_of,
    uniform_of,
    weight_of,
)
from bankfull.sample import table as wishes
from bankfull.sample.draw import NO_TOKEN, WEIGHT_BITS

BINS = tl.constexpr(128)

# What a line wants, by column of the sampling table.
_TEMPERATURE, _TOP_P, _MIN_P = tl.constexpr(wishes.TEMPERATURE), tl.constexpr(wishes.TOP_P), tl.constexpr(wishes.MIN_P)
_TOP_K, _GREEDY = tl.constexpr(wishes.TOP_K), tl.constexpr(wishes.GREEDY)
_SEED, _CHILD = tl.constexpr(wishes.SEED), tl.constexpr(wishes.CHILD)
_NO_TOKEN = tl.constexpr(NO_TOKEN)
_ONE = tl.constexpr(2.0**WEIGHT_BITS)

# What one kernel tells the next about a line. Floats:
SHAPE = tl.constexpr(4)
_TOP, _WARMTH, _SCALE, _FLOOR = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
# Integers: the tokens kept are those with a key below CUT and the first ROOM whose key is CUT.
STATUS = tl.constexpr(8)
_STATE, _FIRST, _LAST, _FOUND = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
_RANK, _GOAL, _CUT, _ROOM = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)

# States. CUT_KNOWN still has to weigh what is kept; SEARCHING has to find the cut before.
_DONE, _WEIGHED, _CUT_KNOWN, _SEARCHING = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def _block_scores(scores, stride, line, block, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    ids = block * BLOCK + tl.arange(0, BLOCK)
    return tl.load(scores + line * stride + ids, mask=ids < VOCAB, other=-float("inf")).to(tl.float32)


@triton.jit
def _block_distances(scores, stride, shape, line, block, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    raw = _block_scores(scores, stride, line, block, VOCAB, BLOCK)
    return distance_of(raw, tl.load(shape + line * SHAPE + _TOP), tl.load(shape + line * SHAPE + _WARMTH))


@triton.jit
def _bin_of(distance, scale):
    """Monotone, and the same in every kernel. The last bin has no end."""
    return tl.minimum(distance * scale, BINS - 1.0).to(tl.int32)


@triton.jit
def block_tops_kernel(
    scores,
    stride,
    tops,
    places,
    bottoms,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    DRAWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The highest score of a block, the first token that has it, and the lowest score that is not banned. A NaN counts
    as infinity: nothing may be chosen from either."""
    program = tl.program_id(0).to(tl.int64)
    line, block = program // BLOCKS, program % BLOCKS
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    raw = _block_scores(scores, stride, line, block, VOCAB, BLOCK)
    raw = tl.where(raw == raw, raw, float("inf"))
    top = tl.max(raw, 0)
    place = tl.min(tl.where(raw == top, tl.arange(0, BLOCK), BLOCK), 0)
    tl.store(tops + program, top)
    tl.store(places + program, (block * BLOCK + place).to(tl.int32))
    if DRAWS:
        tl.store(bottoms + program, tl.min(tl.where(raw > -float("inf"), raw, float("inf")), 0))


@triton.jit
def line_tops_kernel(
    tops,
    places,
    bottoms,
    rows,
    reals,
    reals_stride,
    wholes,
    wholes_stride,
    tokens,
    shape,
    status,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
    DRAWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The best token of a line, and for those that want another one how their scores are shaped."""
    line = tl.program_id(0).to(tl.int64)
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    at = tl.arange(0, WIDTH)
    blocks = line * BLOCKS + at
    there = at < BLOCKS
    each = tl.load(tops + blocks, mask=there, other=-float("inf"))
    place = tl.load(places + blocks, mask=there, other=VOCAB)
    top = tl.max(each, 0)
    usable = (top > -float("inf")) & (top < float("inf"))
    best = tl.min(tl.where(each == top, place, VOCAB), 0)
    tl.store(tokens + line, tl.where(usable, best, _NO_TOKEN).to(tl.int64))
    if DRAWS:
        row = tl.load(rows + line)
        reals += row * reals_stride
        wholes += row * wholes_stride
        temperature = tl.load(reals + _TEMPERATURE).to(tl.float32)
        top_p = tl.load(reals + _TOP_P)
        truncates = (top_p < 1.0) | (tl.load(wholes + _TOP_K) < VOCAB)
        draws = usable & (tl.load(wholes + _GREEDY) == 0)
        # Bins reach as far as scores do and weights are not zero. A nucleus ends where all that lies beyond could not
        # be 1 - top_p of the weight, which is at least that of the best token.
        bottom = tl.min(tl.load(bottoms + blocks, mask=there, other=float("inf")), 0)
        beyond = tl.log(VOCAB / tl.maximum(1.0 - top_p, 1e-12).to(tl.float32))
        beyond = tl.where(tl.load(wholes + _TOP_K) < VOCAB, REACH, beyond)
        reach = tl.minimum(tl.minimum((top - bottom) / temperature, beyond), REACH)
        shape += line * SHAPE
        tl.store(shape + _TOP, top)
        tl.store(shape + _WARMTH, temperature)
        tl.store(shape + _SCALE, BINS / tl.maximum(reach, 1e-6))
        tl.store(shape + _FLOOR, tl.load(reals + _MIN_P).to(tl.float32) * _ONE)
        status += line * STATUS
        state = tl.where(draws, tl.where(truncates, _SEARCHING, _WEIGHED), _DONE)
        tl.store(status + _STATE, state.to(tl.int64))
        tl.store(status + _FOUND, line * 0)
        tl.store(status + _CUT, line * 0 + FAR)
        tl.store(status + _ROOM, line * 0)


@triton.jit
def weigh_kernel(
    scores,
    stride,
    shape,
    status,
    weights,
    counts,
    bins,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The weight of a block: what is drawn from where nothing is cut, and all there is where a cut will be."""
    program = tl.program_id(0).to(tl.int64)
    line, block = program // BLOCKS, program % BLOCKS
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    state = tl.load(status + line * STATUS + _STATE)
    if state != _DONE:
        distance = _block_distances(scores, stride, shape, line, block, VOCAB, BLOCK)
        strength = strength_of(distance)
        if state == _SEARCHING:
            weight = strength.to(tl.int64)
            counted = tl.histogram(_bin_of(distance, tl.load(shape + line * SHAPE + _SCALE)), BINS, mask=weight > 0)
            tl.store(bins + program * BINS + tl.arange(0, BINS), counted)
            tl.store(weights + program, tl.sum(weight, 0))
        else:
            floor = tl.load(shape + line * SHAPE + _FLOOR)
            tl.store(weights + program, tl.sum(tl.where(strength >= floor, strength, 0.0).to(tl.int64), 0))
            tl.store(counts + program, 0)


@triton.jit
def bracket_kernel(
    rows,
    reals,
    reals_stride,
    wholes,
    wholes_stride,
    shape,
    status,
    weights,
    bins,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    status += line * STATUS
    if tl.load(status + _STATE) == _SEARCHING:
        row = tl.load(rows + line)
        top_k = tl.load(wholes + row * wholes_stride + _TOP_K)
        top_p = tl.load(reals + row * reals_stride + _TOP_P)
        at = tl.arange(0, WIDTH)
        total = tl.sum(tl.load(weights + line * BLOCKS + at, mask=at < BLOCKS, other=0), 0)
        counted = _line_bins(bins, line, BLOCKS)
        if top_k < tl.sum(counted, 0):
            # A share is one of what top-k leaves, so all of that is collected; without a share, one bin is enough.
            last = tl.sum((tl.cumsum(counted, 0) < top_k).to(tl.int32), 0)
            tl.store(status + _FIRST, tl.where(top_p < 1.0, 0, last).to(tl.int64))
            tl.store(status + _LAST, last.to(tl.int64))
            tl.store(status + _RANK, top_k)
        elif top_p < 1.0:
            share = top_p * total.to(tl.float64)
            first, last = _share_bins(counted, total.to(tl.float64), share, tl.load(shape + line * SHAPE + _SCALE))
            tl.store(status + _FIRST, first.to(tl.int64))
            tl.store(status + _LAST, last.to(tl.int64))
            tl.store(status + _RANK, line * 0)
            tl.store(status + _GOAL, least_reaching(share))
        else:
            tl.store(status + _STATE, line * 0 + _CUT_KNOWN)  # what top-k would cut weighs nothing


@triton.jit
def _line_bins(bins, line, BLOCKS: tl.constexpr):
    """The histogram of a line: 32 blocks at a time, since one load waits as long as many."""
    ROWS: tl.constexpr = 32
    column = tl.arange(0, BINS)
    counted = tl.zeros((BINS,), tl.int32)
    for start in range(0, BLOCKS, ROWS):
        block = start + tl.arange(0, ROWS)
        at = bins + (line * BLOCKS + block)[:, None] * BINS + column[None, :]
        counted += tl.sum(tl.load(at, mask=(block < BLOCKS)[:, None], other=0), 0)
    return counted


@triton.jit
def _share_bins(counted, total, share, scale):
    """The first and the last bin in which the best tokens may come to weigh `share`.

    What a bin weighs lies between its count times the weights at its two ends. That bounds the sum from the best token
    on and, since the total is known, the sum from the worst on; of both bounds the tighter one counts.
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
def collect_kernel(
    scores,
    stride,
    shape,
    status,
    weights,
    counts,
    found_keys,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROOM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """In no particular order: the search only counts and sums. Beyond ROOM tokens are counted, but not noted."""
    program = tl.program_id(0).to(tl.int64)
    line, block = program // BLOCKS, program % BLOCKS
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    status += line * STATUS
    if tl.load(status + _STATE) == _SEARCHING:
        first, last = tl.load(status + _FIRST), tl.load(status + _LAST)
        distance = _block_distances(scores, stride, shape, line, block, VOCAB, BLOCK)
        weight = weight_of(distance)
        number = _bin_of(distance, tl.load(shape + line * SHAPE + _SCALE))
        above = (number < first) & (weight > 0)
        tl.store(weights + program, tl.sum(tl.where(above, weight, 0), 0))
        tl.store(counts + program, tl.sum(above.to(tl.int32), 0))
        between = (number >= first) & (number <= last) & (weight > 0)
        many = tl.sum(between.to(tl.int32), 0)
        if many > 0:
            start = tl.atomic_add(status + _FOUND, many.to(tl.int64))
            place = start + tl.cumsum(between.to(tl.int32), 0) - 1
            tl.store(found_keys + line * ROOM + place, key_of(distance), mask=between & (place < ROOM))


@triton.jit
def _candidate_keys(start, candidates, TILE: tl.constexpr):
    """From the list or, where there were too many for it, from the scores of all tokens."""
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
    """For each limit: how many candidates have a key of at most that, and their weight."""
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
    """The least key up to which candidates are `goal` many, or weigh as much, if not before then at `high`; with how
    many lie before it, and their weight. A round takes as long as its sums take to meet, so it has WAYS of them."""
    count_before = goal * 0
    weight_before = goal * 0
    way = tl.arange(0, WAYS)
    while low < high:
        limits = low + ((high - low).to(tl.int64) * way // WAYS).to(tl.int32)
        count, weight = _up_to(limits, candidates, WAYS, TILE)
        short = (weight if BY_WEIGHT else count.to(tl.int64)) < goal
        # Limits and sums ascend together: those that fall short come first, and the last of them is the nearest.
        count_before = tl.maximum(count_before, tl.max(tl.where(short, count, 0), 0))
        weight_before = tl.maximum(weight_before, tl.max(tl.where(short, weight, 0), 0))
        low = tl.max(tl.where(short, limits + 1, low), 0)
        high = tl.min(tl.where(short, high, limits), 0)
    return low, count_before, weight_before


@triton.jit
def cut_kernel(
    scores,
    stride,
    rows,
    reals,
    reals_stride,
    shape,
    status,
    weights,
    counts,
    found_keys,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROOM: tl.constexpr,
    WAYS: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    status += line * STATUS
    if tl.load(status + _STATE) == _SEARCHING:
        top_p = tl.load(reals + tl.load(rows + line) * reals_stride + _TOP_P)
        at = tl.arange(0, WIDTH)
        found = tl.load(status + _FOUND)
        listed = found <= ROOM
        above = (at < BLOCKS) & listed
        weight_above = tl.sum(tl.load(weights + line * BLOCKS + at, mask=above, other=0), 0)
        count_above = tl.sum(tl.load(counts + line * BLOCKS + at, mask=above, other=0), 0)
        candidates = (
            tl.where(listed, found, VOCAB).to(tl.int32),
            listed,
            found_keys + line * ROOM,
            scores + line * stride,
            tl.load(shape + line * SHAPE + _TOP),
            tl.load(shape + line * SHAPE + _WARMTH),
        )
        low, high = _range_of_keys(candidates, TILE)
        rank = tl.load(status + _RANK)
        if rank > 0:
            rank -= count_above
            high, count, weight = _cut_at(rank, low, high, candidates, False, WAYS, TILE)
            room = rank - count
            inside = weight_above + weight + room * weight_of(high.to(tl.float32, bitcast=True))
            goal = least_reaching(top_p * inside.to(tl.float64))
        else:
            room = rank
            goal = tl.load(status + _GOAL)
        if top_p < 1.0:
            goal -= weight_above
            high, count, weight = _cut_at(goal, low, high, candidates, True, WAYS, TILE)
            each = weight_of(high.to(tl.float32, bitcast=True))
            room = (goal - weight + each - 1) // each
        tl.store(status + _CUT, high.to(tl.int64))
        tl.store(status + _ROOM, room)


@triton.jit
def weigh_kept_kernel(
    scores,
    stride,
    shape,
    status,
    weights,
    counts,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Of each block the weight before the cut, and how many tokens lie on it: how many of these stay is known only
    with the blocks before."""
    program = tl.program_id(0).to(tl.int64)
    line, block = program // BLOCKS, program % BLOCKS
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    status += line * STATUS
    if tl.load(status + _STATE) >= _CUT_KNOWN:
        cut = tl.load(status + _CUT)
        floor = tl.load(shape + line * SHAPE + _FLOOR)
        distance = _block_distances(scores, stride, shape, line, block, VOCAB, BLOCK)
        strength = strength_of(distance)
        key = key_of(distance)
        kept = (key < cut) & (strength >= floor)
        tl.store(weights + program, tl.sum(tl.where(kept, strength, 0.0).to(tl.int64), 0))
        tl.store(counts + program, tl.sum((key == cut).to(tl.int32), 0))


@triton.jit
def pick_kernel(
    scores,
    stride,
    rows,
    wholes,
    wholes_stride,
    length,
    shape,
    status,
    weights,
    counts,
    tokens,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
    PURPOSE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    status += line * STATUS
    if tl.load(status + _STATE) != _DONE:
        wholes += tl.load(rows + line) * wholes_stride
        position = tl.load(length + line).to(tl.int64)
        uniform = uniform_of(tl.load(wholes + _SEED), tl.load(wholes + _CHILD), position, PURPOSE)
        cut, room = tl.load(status + _CUT).to(tl.int32), tl.load(status + _ROOM)
        floor = tl.load(shape + line * SHAPE + _FLOOR)

        at = tl.arange(0, WIDTH)
        blocks = line * BLOCKS + at
        on_cut = tl.load(counts + blocks, mask=at < BLOCKS, other=0).to(tl.int64)
        stay = tl.minimum(tl.maximum(room - (tl.cumsum(on_cut, 0) - on_cut), 0), on_cut)
        on_cut_strength = strength_of(cut.to(tl.float32, bitcast=True))
        each = tl.where(on_cut_strength >= floor, on_cut_strength, 0.0).to(tl.int64)
        weight = tl.load(weights + blocks, mask=at < BLOCKS, other=0) + stay * each
        total = tl.sum(weight, 0)
        goal = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
        block = tl.sum((tl.cumsum(weight, 0) <= goal).to(tl.int32), 0)
        goal -= tl.sum(tl.where(at < block, weight, 0), 0)
        room -= tl.sum(tl.where(at < block, on_cut, 0), 0)

        distance = _block_distances(scores, stride, shape, line, block, VOCAB, BLOCK)
        strength = strength_of(distance)
        key = key_of(distance)
        stays = (key == cut) & (tl.cumsum((key == cut).to(tl.int32), 0) <= room)
        kept = ((key < cut) | stays) & (strength >= floor)
        inside = tl.where(kept, strength, 0.0).to(tl.int64)
        place = tl.sum((tl.cumsum(inside, 0) <= goal).to(tl.int32), 0)
        tl.store(tokens + line, (block * BLOCK + place).to(tl.int64))
