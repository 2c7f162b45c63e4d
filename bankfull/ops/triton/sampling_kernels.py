"""From scores to tokens without sorting: passes over blocks of the vocabulary alternate with one program per row.

1. `block_tops`, `line_tops`: the maximum score and its token. A greedy row ends here.
2. `weigh`: the weight of each block; for rows with truncation also a histogram of distances.
3. `bracket` (this and the next two in `sampling_truncation`): from the histogram, the few bins that contain the cutoff.
4. `collect`: the tokens of these bins, as keys, and the weight above them.
5. `cut`: the exact cutoff, by bisection over the collected keys.
6. `weigh_kept`: the weight that the cutoff leaves in each block.
7. `pick`: the block, and in it the token, selected by the random number.

Rows skip unneeded passes by their own state, so the launches do not depend on the sampling parameters. All decisions
are exact comparisons or integer sums: results depend neither on the block size nor on other rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bankfull.ops.triton.launch import start_next, wait_for_inputs
from bankfull.ops.triton.sampling_numbers import (
    FAR,
    REACH,
    key_of,
    strength_of,
    uniform_of,
)
from bankfull.ops.triton.sampling_state import (
    AT_CUT,
    AT_FLOOR,
    AT_FOUND,
    AT_ROOM,
    AT_SCALE,
    AT_STATE,
    AT_TEMPERATURE,
    AT_TOP,
    BINS,
    CHILD,
    CUT_KNOWN,
    DONE,
    GREEDY,
    MIN_P,
    NO_TOKEN,
    ONE,
    SEARCHING,
    SEED,
    SHAPE,
    STATUS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    WEIGHED,
    bin_of,
    block_distances,
    block_scores,
)


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
    """The maximum score of a block, the first token that has it, and the minimum score that is not banned. A NaN counts
    as infinity: neither may be chosen from."""
    program = tl.program_id(0).to(tl.int64)
    line, block = program // BLOCKS, program % BLOCKS
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    raw = block_scores(scores, stride, line, block, VOCAB, BLOCK)
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
    """The argmax of a row, and for sampled rows the parameters of their scores."""
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
    tl.store(tokens + line, tl.where(usable, best, NO_TOKEN).to(tl.int64))
    if DRAWS:
        row = tl.load(rows + line)
        reals += row * reals_stride
        wholes += row * wholes_stride
        temperature = tl.load(reals + TEMPERATURE).to(tl.float32)
        top_p = tl.load(reals + TOP_P)
        truncates = (top_p < 1.0) | (tl.load(wholes + TOP_K) < VOCAB)
        draws = usable & (tl.load(wholes + GREEDY) == 0)
        # Bins cover the range of scores with nonzero weight. A nucleus ends where all tokens beyond together have less
        # than 1 - top_p of the weight, which is at least that of the best token.
        bottom = tl.min(tl.load(bottoms + blocks, mask=there, other=float("inf")), 0)
        beyond = tl.log(VOCAB / tl.maximum(1.0 - top_p, 1e-12).to(tl.float32))
        beyond = tl.where(tl.load(wholes + TOP_K) < VOCAB, REACH, beyond)
        reach = tl.minimum(tl.minimum((top - bottom) / temperature, beyond), REACH)
        shape += line * SHAPE
        tl.store(shape + AT_TOP, top)
        tl.store(shape + AT_TEMPERATURE, temperature)
        tl.store(shape + AT_SCALE, BINS / tl.maximum(reach, 1e-6))
        tl.store(shape + AT_FLOOR, tl.load(reals + MIN_P).to(tl.float32) * ONE)
        status += line * STATUS
        state = tl.where(draws, tl.where(truncates, SEARCHING, WEIGHED), DONE)
        tl.store(status + AT_STATE, state.to(tl.int64))
        tl.store(status + AT_FOUND, line * 0)
        tl.store(status + AT_CUT, line * 0 + FAR)
        tl.store(status + AT_ROOM, line * 0)


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
    """The weight of a block: the final one without truncation, the total with it."""
    program = tl.program_id(0).to(tl.int64)
    line, block = program // BLOCKS, program % BLOCKS
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    state = tl.load(status + line * STATUS + AT_STATE)
    if state != DONE:
        distance = block_distances(scores, stride, shape, line, block, VOCAB, BLOCK)
        strength = strength_of(distance)
        if state == SEARCHING:
            weight = strength.to(tl.int64)
            counted = tl.histogram(bin_of(distance, tl.load(shape + line * SHAPE + AT_SCALE)), BINS, mask=weight > 0)
            tl.store(bins + program * BINS + tl.arange(0, BINS), counted)
            tl.store(weights + program, tl.sum(weight, 0))
        else:
            floor = tl.load(shape + line * SHAPE + AT_FLOOR)
            tl.store(weights + program, tl.sum(tl.where(strength >= floor, strength, 0.0).to(tl.int64), 0))
            tl.store(counts + program, 0)


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
    """The weight of each block below the cutoff, and the number of its tokens at the cutoff: how many of these are kept
    depends on the blocks before."""
    program = tl.program_id(0).to(tl.int64)
    line, block = program // BLOCKS, program % BLOCKS
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    status += line * STATUS
    if tl.load(status + AT_STATE) >= CUT_KNOWN:
        cut = tl.load(status + AT_CUT)
        floor = tl.load(shape + line * SHAPE + AT_FLOOR)
        distance = block_distances(scores, stride, shape, line, block, VOCAB, BLOCK)
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
    if tl.load(status + AT_STATE) != DONE:
        wholes += tl.load(rows + line) * wholes_stride
        position = tl.load(length + line).to(tl.int64)
        uniform = uniform_of(tl.load(wholes + SEED), tl.load(wholes + CHILD), position, PURPOSE)
        cut, room = tl.load(status + AT_CUT).to(tl.int32), tl.load(status + AT_ROOM)
        floor = tl.load(shape + line * SHAPE + AT_FLOOR)

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

        distance = block_distances(scores, stride, shape, line, block, VOCAB, BLOCK)
        strength = strength_of(distance)
        key = key_of(distance)
        stays = (key == cut) & (tl.cumsum((key == cut).to(tl.int32), 0) <= room)
        kept = ((key < cut) | stays) & (strength >= floor)
        inside = tl.where(kept, strength, 0.0).to(tl.int64)
        place = tl.sum((tl.cumsum(inside, 0) <= goal).to(tl.int32), 0)
        tl.store(tokens + line, (block * BLOCK + place).to(tl.int64))
