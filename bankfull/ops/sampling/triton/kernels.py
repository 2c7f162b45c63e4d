"""From scores to tokens without sorting: passes over blocks of the vocabulary alternate with one program per row.

1. `block_tops`, `line_tops`: the maximum score and its token. A greedy row ends here.
2. `weigh`: for rows with truncation, the weight of each block and a histogram of distances.
3. `bracket` (this and the next two in `sampling_truncation`): from the histogram, the few bins that contain the cutoff.
4. `collect`: the tokens of these bins, as keys, and the weight above them.
5. `cut`: the exact cutoff, by bisection over the collected keys.
6. `race`: for each block, an upper bound of the keys of its kept tokens, from the high words of their numbers.
7. `pick`: exact keys in the blocks whose bound may be the highest, nearly always one, and the token that wins.

Rows skip unneeded passes by their own state, so the launches do not depend on the sampling parameters. All decisions
are exact comparisons or integer sums: results depend neither on the block size nor on other rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bankfull.ops.sampling.triton.numbers import (
    FAR,
    RACE_REACH,
    REACH,
    SLACK,
    distance_of,
    gumbel_of,
    highest_gumbel_of,
    key_of,
    race_words,
    strength_of,
    word_of,
)
from bankfull.ops.sampling.triton.state import (
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
    bin_of,
    block_distances,
    block_scores,
)
from bankfull.ops.triton.launch import start_next, wait_for_inputs


@triton.jit
def block_tops_kernel(scores, stride, tops, places, bottoms, SIZE: tl.constexpr, OVERLAP: tl.constexpr):
    """The maximum score of a block, the first token that has it, and the minimum score that is not banned. A NaN counts
    as infinity: neither may be chosen from."""
    program = tl.program_id(0).to(tl.int64)
    line, block = program // SIZE.blocks, program % SIZE.blocks
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    raw = block_scores(scores, stride, line, block, SIZE)
    raw = tl.where(raw == raw, raw, float("inf"))
    top = tl.max(raw, 0)
    place = tl.min(tl.where(raw == top, tl.arange(0, SIZE.block), SIZE.block), 0)
    tl.store(tops + program, top)
    tl.store(places + program, (block * SIZE.block + place).to(tl.int32))
    if bottoms is not None:
        tl.store(bottoms + program, tl.min(tl.where(raw > -float("inf"), raw, float("inf")), 0))


@triton.jit
def line_tops_kernel(tops, places, tokens, own, passes, SIZE: tl.constexpr, OVERLAP: tl.constexpr):
    """The argmax of a row, and for sampled rows the parameters of their scores."""
    line = tl.program_id(0).to(tl.int64)
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    at = tl.arange(0, SIZE.width)
    blocks = line * SIZE.blocks + at
    there = at < SIZE.blocks
    each = tl.load(tops + blocks, mask=there, other=-float("inf"))
    place = tl.load(places + blocks, mask=there, other=SIZE.vocab)
    top = tl.max(each, 0)
    usable = (top > -float("inf")) & (top < float("inf"))
    best = tl.min(tl.where(each == top, place, SIZE.vocab), 0)
    tl.store(tokens + line, tl.where(usable, best, NO_TOKEN).to(tl.int64))
    if own is not None:
        row = tl.load(own.rows + line)
        reals, wholes = own.reals + row * own.reals_stride, own.wholes + row * own.wholes_stride
        temperature = tl.load(reals + TEMPERATURE).to(tl.float32)
        top_p = tl.load(reals + TOP_P)
        truncates = (top_p < 1.0) | (tl.load(wholes + TOP_K) < SIZE.vocab)
        draws = usable & (tl.load(wholes + GREEDY) == 0)
        # Bins cover the range of scores with nonzero weight. A nucleus ends where all tokens beyond together have less
        # than 1 - top_p of the weight, which is at least that of the best token.
        bottom = tl.min(tl.load(passes.bottoms + blocks, mask=there, other=float("inf")), 0)
        beyond = tl.log(SIZE.vocab / tl.maximum(1.0 - top_p, 1e-12).to(tl.float32))
        beyond = tl.where(tl.load(wholes + TOP_K) < SIZE.vocab, REACH, beyond)
        reach = tl.minimum(tl.minimum((top - bottom) / temperature, beyond), REACH)
        shape = passes.shape + line * SHAPE
        tl.store(shape + AT_TOP, top)
        tl.store(shape + AT_TEMPERATURE, temperature)
        tl.store(shape + AT_SCALE, BINS / tl.maximum(reach, 1e-6))
        tl.store(shape + AT_FLOOR, tl.load(reals + MIN_P).to(tl.float32) * ONE)
        status = passes.status + line * STATUS
        state = tl.where(draws, tl.where(truncates, SEARCHING, CUT_KNOWN), DONE)
        tl.store(status + AT_STATE, state.to(tl.int64))
        tl.store(status + AT_FOUND, line * 0)
        tl.store(status + AT_CUT, line * 0 + FAR)
        tl.store(status + AT_ROOM, line * 0)


@triton.jit
def weigh_kernel(own, passes, SIZE: tl.constexpr, OVERLAP: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    line, block = program // SIZE.blocks, program % SIZE.blocks
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    if tl.load(passes.status + line * STATUS + AT_STATE) == SEARCHING:
        distance = block_distances(own, passes.shape, line, block, SIZE)
        weight = strength_of(distance).to(tl.int64)
        scale = tl.load(passes.shape + line * SHAPE + AT_SCALE)
        counted = tl.histogram(bin_of(distance, scale), BINS, mask=weight > 0)
        tl.store(passes.bins + program * BINS + tl.arange(0, BINS), counted)
        tl.store(passes.weights + program, tl.sum(weight, 0))


@triton.jit
def _number_key(own, line, PURPOSE: tl.constexpr):
    wholes = own.wholes + tl.load(own.rows + line) * own.wholes_stride
    return tl.load(wholes + SEED), tl.load(wholes + CHILD), tl.load(own.length + line).to(tl.int64), PURPOSE


@triton.jit
def _bounds(scores, ids, high, top, temperature, cut, floor, SIZE: tl.constexpr):
    """Upper bounds of the keys of tokens below the cutoff and of those at it (-inf for the others), and which are at
    it."""
    raw = tl.load(scores + ids, mask=ids < SIZE.vocab, other=-float("inf")).to(tl.float32)
    distance = distance_of(raw, top, temperature)
    bound = highest_gumbel_of(high) - distance
    bound = tl.where((distance <= RACE_REACH) & (strength_of(distance) >= floor), bound, -float("inf"))
    key = key_of(distance)
    return tl.where(key < cut, bound, -float("inf")), tl.where(key == cut, bound, -float("inf")), key == cut


@triton.jit
def race_kernel(own, passes, SIZE: tl.constexpr, PURPOSE: tl.constexpr, OVERLAP: tl.constexpr):
    """The highest bound of a block's tokens below the cutoff and of those at it, and how many are at it: which of these
    are kept depends on the blocks before. A call of Philox gives the words of four tokens, which lie four apart."""
    program = tl.program_id(0).to(tl.int64)
    line, block = program // SIZE.blocks, program % SIZE.blocks
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    status = passes.status + line * STATUS
    if tl.load(status + AT_STATE) != DONE:
        shape = passes.shape + line * SHAPE
        top, temperature = tl.load(shape + AT_TOP), tl.load(shape + AT_TEMPERATURE)
        cut, floor = tl.load(status + AT_CUT).to(tl.int32), tl.load(shape + AT_FLOOR)
        nearest = distance_of(tl.load(passes.tops + program), top, temperature)
        bound = (line * 0).to(tl.float32) - float("inf")
        cut_bound, count = bound, (line * 0).to(tl.int32)
        if (nearest <= RACE_REACH) & (key_of(nearest) <= cut):
            key = _number_key(own, line, PURPOSE)
            at = tl.arange(0, SIZE.block // 4)
            first, second, third, fourth = race_words(key, (block * (SIZE.block // 4)).to(tl.int32) + at, False)
            ids = block * SIZE.block + (at // 4) * 16 + at % 4
            scores = own.scores + line * own.stride
            a, cut_a, on_a = _bounds(scores, ids, first, top, temperature, cut, floor, SIZE)
            b, cut_b, on_b = _bounds(scores, ids + 4, second, top, temperature, cut, floor, SIZE)
            c, cut_c, on_c = _bounds(scores, ids + 8, third, top, temperature, cut, floor, SIZE)
            d, cut_d, on_d = _bounds(scores, ids + 12, fourth, top, temperature, cut, floor, SIZE)
            bound = tl.max(tl.maximum(tl.maximum(a, b), tl.maximum(c, d)), 0)
            cut_bound = tl.max(tl.maximum(tl.maximum(cut_a, cut_b), tl.maximum(cut_c, cut_d)), 0)
            on = on_a.to(tl.int32) + on_b.to(tl.int32) + on_c.to(tl.int32) + on_d.to(tl.int32)
            count = tl.sum(on, 0)
        tl.store(passes.bounds + program, bound)
        tl.store(passes.cut_bounds + program, cut_bound)
        tl.store(passes.counts + program, count)


@triton.jit
def pick_kernel(own, passes, tokens, SIZE: tl.constexpr, PURPOSE: tl.constexpr, OVERLAP: tl.constexpr):
    """The token with the highest key. Blocks are tried by their bounds until no bound reaches the highest key."""
    line = tl.program_id(0).to(tl.int64)
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    status = passes.status + line * STATUS
    if tl.load(status + AT_STATE) != DONE:
        number_key = _number_key(own, line, PURPOSE)
        cut, room = tl.load(status + AT_CUT).to(tl.int32), tl.load(status + AT_ROOM)
        floor = tl.load(passes.shape + line * SHAPE + AT_FLOOR)
        at = tl.arange(0, SIZE.width)
        blocks = line * SIZE.blocks + at
        on_cut = tl.load(passes.counts + blocks, mask=at < SIZE.blocks, other=0).to(tl.int64)
        rooms = room - (tl.cumsum(on_cut, 0) - on_cut)
        bound = tl.load(passes.bounds + blocks, mask=at < SIZE.blocks, other=-float("inf"))
        cut_bound = tl.load(passes.cut_bounds + blocks, mask=at < SIZE.blocks, other=-float("inf"))
        bound = tl.maximum(bound, tl.where(rooms > 0, cut_bound, -float("inf")))

        lead = (line * 0).to(tl.float64) - float("inf")
        token = line * 0 + SIZE.vocab
        highest = tl.max(bound, 0)
        while (highest > -float("inf")) & (highest.to(tl.float64) + SLACK >= lead):
            block = tl.min(tl.where(bound == highest, at, SIZE.width), 0)
            distance = block_distances(own, passes.shape, line, block, SIZE)
            key = key_of(distance)
            stays = (key == cut) & (
                tl.cumsum((key == cut).to(tl.int32), 0) <= tl.sum(tl.where(at == block, rooms, 0), 0)
            )
            kept = ((key < cut) | stays) & (strength_of(distance) >= floor) & (distance <= RACE_REACH)
            ids = block * SIZE.block + tl.arange(0, SIZE.block)
            number = gumbel_of(word_of(ids, number_key, False), word_of(ids, number_key, True))
            exact = tl.where(kept, number - distance.to(tl.float64), -float("inf"))
            most = tl.max(exact, 0)
            winner = tl.min(tl.where(kept & (exact == most), ids, SIZE.vocab), 0).to(tl.int64)
            token = tl.where(most > lead, winner, tl.where(most == lead, tl.minimum(winner, token), token))
            lead = tl.maximum(most, lead)
            bound = tl.where(at == block, -float("inf"), bound)
            highest = tl.max(bound, 0)
        tl.store(tokens + line, token)
