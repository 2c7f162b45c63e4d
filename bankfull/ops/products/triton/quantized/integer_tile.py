"""Tiles of quantized weights in registers, and their products with fixed-point activations by integer dot products.

Loaded values stay untouched until their products: even converting a scale would wait for the load.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bankfull.ops.products.triton.quantized.codes import INTERLEAVE, as_minimum, as_scale
from bankfull.ops.products.triton.quantized.fixed_point import (
    FLOAT_ZERO,
    bytes_as_floats,
    bytes_of,
    dot4,
    fixed_point,
    group_sums,
    halves_as_floats,
    planes,
    split_planes,
    split_runs,
)
from bankfull.ops.products.triton.quantized.rows import neighbours
from bankfull.ops.products.triton.tile_outputs import tile_outputs


@triton.jit
def load_tile(words, tile, FORM: tl.constexpr, TILE: tl.constexpr):
    """The words [R, W] of a tile, the words of their third bits, and the raw scales and minima of their groups for
    `group_scales`."""
    R: tl.constexpr = TILE.outputs
    W: tl.constexpr = TILE.words
    L: tl.constexpr = FORM.length
    GROUPS: tl.constexpr = TILE.groups
    side: tl.constexpr = TILE.side
    outputs = words.outputs
    word = tl.arange(0, W)
    group = tl.arange(0, W // L)
    output, valid = tile_outputs(tile, outputs, TILE)
    if TILE.even:
        there = tile * side < outputs // (R // side)
        lanes = tl.arange(0, R)
        across = outputs.to(tl.int64) // (R // side)
        at = (lanes % side)[:, None] * (GROUPS * L) + word[None, :]
        if TILE.gate != "":
            at = at + (lanes // side).to(tl.int64)[:, None] * (across * (GROUPS * L))
        places = words.codes + (tile * side).to(tl.int64) * (GROUPS * L)
        inside = tl.broadcast_to(there, [1, W])
        known = tl.broadcast_to(there, [1, W // L])
        if W != GROUPS * L:
            inside = inside & (word < GROUPS * L)[None, :]
            known = known & (group < GROUPS)[None, :]
    else:
        places = words.codes
        at = output.to(tl.int64)[:, None] * (GROUPS * L) + word[None, :]
        inside = valid[:, None] & (word < GROUPS * L)[None, :]
        known = valid[:, None] & (group < GROUPS)[None, :]
    # Read once per row, so not kept in the cache.
    codes = tl.load(places + at, inside, 0, eviction_policy="evict_first").to(tl.uint32, bitcast=True)
    thirds = codes
    if FORM.bits == 3:
        # Four words come first, so that threads are laid along them and each holds the third bits of its own words.
        run: tl.constexpr = min(4, W)
        two = tl.arange(0, W // run)[:, None, None] * (run // 2) + tl.arange(0, run // 2)[None, None, :]
        if TILE.even:
            places = words.high + (tile * side).to(tl.int64) * (GROUPS * L // 2)
            at = (lanes % side)[None, :, None] * (GROUPS * L // 2) + two
            if TILE.gate != "":
                at = at + (lanes // side).to(tl.int64)[None, :, None] * (across * (GROUPS * L // 2))
            inside = tl.broadcast_to(there, [W // run, 1, run // 2])
            if W != GROUPS * L:
                inside = inside & (two < GROUPS * L // 2)
        else:
            places = words.high
            at = output.to(tl.int64)[None, :, None] * (GROUPS * L // 2) + two
            inside = valid[None, :, None] & (two < GROUPS * L // 2)
        thirds = tl.load(places + at, inside, 0, eviction_policy="evict_first").to(tl.uint32, bitcast=True)
    scale = tl.zeros([1, 1], tl.int32)
    minimum = scale
    outer = scale
    outers: tl.constexpr = GROUPS // (256 // FORM.group) if FORM.nested else 1
    if FORM.nested and FORM.minima != 0:
        if TILE.even:
            # For T rows, a word holds scale and minimum of two rows, or the outer ones of one. Groups come first, so
            # that threads are laid along them and each holds the scales of its words.
            T: tl.constexpr = min(side, INTERLEAVE)
            blocks = tl.arange(0, R // T)
            first = tile * side + blocks % (side // T) * T
            first = first.to(tl.int64) + (blocks // (side // T)).to(tl.int64) * across
            rows = (first // INTERLEAVE)[None, :, None]
            own = first % INTERLEAVE if T < INTERLEAVE else first * 0
            own = own[None, :, None]
            here = tl.broadcast_to(tl.reshape(known, [W // L, 1, 1]), [W // L, R // T, 1])
            pairs = tl.arange(0, T // 2)[None, None, :]
            at = (rows * GROUPS + group[:, None, None]) * (INTERLEAVE // 2) + own // 2 + pairs
            scale = tl.load(words.scales.to(tl.pointer_type(tl.int32)) + at, here, 0)
            each = tl.arange(0, T)[None, None, :]
            at = (rows * outers + (group // (256 // FORM.group))[:, None, None]) * INTERLEAVE + own + each
            outer = tl.load(words.outer_scales + at, here, 0)
        else:
            rows = output.to(tl.int64)[:, None] // INTERLEAVE
            own = output[:, None] % INTERLEAVE
            scale = tl.load(words.scales + (rows * GROUPS + group[None, :]) * INTERLEAVE + own, known, 0).to(tl.int32)
            at = (rows * outers + (group // (256 // FORM.group))[None, :]) * INTERLEAVE + own
            outer = tl.load(words.outer_scales + at, known, 0)
    elif not FORM.by_row:
        at = output.to(tl.int64)[:, None] * GROUPS + group[None, :]
        scale = tl.load(words.scales + at, known, 0)
        if FORM.nested:
            at = output.to(tl.int64)[:, None] * outers + (group // (256 // FORM.group))[None, :]
            outer = tl.load(words.outer_scales + at, known, 0)
        if FORM.minima != 0:
            minimum = tl.load(words.minima + at, known, 0)
    return codes, thirds, scale, minimum, outer


@triton.jit
def as_rows(x, R: tl.constexpr, T: tl.constexpr, G: tl.constexpr):
    """[G, R / T, T] as [R, G]."""
    return tl.reshape(tl.permute(tl.reshape(x, [G, R // T, T]), (1, 2, 0)), [R, G])


@triton.jit
def group_scales(scale, minimum, outer, FORM: tl.constexpr, TILE: tl.constexpr):
    """Scales and minima (signed), [R, G] float32. Without minima the second result is unused."""
    if FORM.nested and FORM.minima != 0:
        R: tl.constexpr = TILE.outputs
        G: tl.constexpr = TILE.words // FORM.length
        T: tl.constexpr = min(TILE.side, INTERLEAVE)
        outer_scale, outer_minimum = halves_as_floats(outer)
        small, small_minimum, other, other_minimum = bytes_as_floats(scale)
        if TILE.even:
            small, small_minimum = (
                as_rows(tl.join(small, other), R, T, G),
                as_rows(tl.join(small_minimum, other_minimum), R, T, G),
            )
            outer_scale, outer_minimum = as_rows(outer_scale, R, T, G), as_rows(outer_minimum, R, T, G)
        return small * outer_scale, FORM.minima * (small_minimum * outer_minimum)
    else:
        scales = as_scale(scale)
        if FORM.nested:
            scales = scales * outer.to(tl.float32)
        return scales, as_minimum(minimum, scales, FORM.minima)


@triton.jit
def integer_sums(upper, lower, codes, thirds, FORM: tl.constexpr, R: tl.constexpr, W: tl.constexpr, RUN: tl.constexpr):
    """Exact sums over each run of words, [R, W / RUN], of codes times activations; of 2- and 3-bit codes 16 times."""
    words = split_runs(codes, R, W, RUN)
    thirds = split_runs(tl.permute(thirds, (1, 0, 2)), R, W // 2, RUN // 2) if FORM.bits == 3 else words
    high = tl.zeros([R, W // RUN], tl.int32)
    rest = tl.zeros([R, W // RUN], tl.int32)
    if FORM.bits <= 3:
        high_16 = tl.zeros([R, W // RUN], tl.int32)
        rest_16 = tl.zeros([R, W // RUN], tl.int32)
    for i in tl.static_range(RUN):
        apart = bytes_of(words[i], thirds[i // 2], i % 2 == 1, FORM.bits, FORM.floats)
        for j in tl.static_range(len(apart)):
            if FORM.bits <= 3 and j % 2 == 1:
                high_16 = dot4(apart[j], upper[i * len(apart) + j], high_16, True)
                rest_16 = dot4(apart[j], lower[i * len(apart) + j], rest_16, False)
            else:
                high = dot4(apart[j], upper[i * len(apart) + j], high, True)
                rest = dot4(apart[j], lower[i * len(apart) + j], rest, False)
    exact = high * 256 + rest
    if FORM.bits <= 3:
        exact = exact * 16 + (high_16 * 256 + rest_16)
    return exact


@triton.jit
def products(line, codes, thirds, scale, minimum, FORM: tl.constexpr, TILE: tl.constexpr):
    """The sums of each thread's words for each output, [R, W / RUN]. Integer sums, over a thread's words of a group,
    are exact."""
    upper, lower, factors, whole = line
    R: tl.constexpr = TILE.outputs
    W: tl.constexpr = TILE.words
    L: tl.constexpr = FORM.length
    run: tl.constexpr = neighbours(L)
    exact = integer_sums(upper, lower, codes, thirds, FORM, R, W, run)
    found = tl.reshape(exact.to(tl.float32), [R, W // L, L // run]) * tl.reshape(factors, [1, W // L, 1])
    # A group's zero point and minimum are applied in only one of its threads.
    first = (tl.arange(0, L // run) == 0)[None, None, :]
    if FORM.zero != 0 or FORM.floats:
        zero: tl.constexpr = FLOAT_ZERO if FORM.floats else FORM.zero
        found -= tl.where(first, zero * tl.reshape(whole, [1, W // L, 1]), 0.0)
    if not FORM.by_row:
        found = found * scale[:, :, None]
        if FORM.minima != 0:
            found += tl.where(first, minimum[:, :, None] * tl.reshape(whole, [1, W // L, 1]), 0.0)
    return tl.reshape(found, [R, W // run])


@triton.jit
def prepared(line, FORM: tl.constexpr, W: tl.constexpr):
    """Activations for `products`: planes of their upper and lower bytes, the power of two of each group in units of the
    integer sums, and the groups' sums."""
    L: tl.constexpr = FORM.length
    whole = group_sums(line, W, L)
    numbers, factors = fixed_point(line, W, L)
    upper = split_planes(planes(numbers, 1, FORM.floats), W, neighbours(L))
    lower = split_planes(planes(numbers, 0, FORM.floats), W, neighbours(L))
    if FORM.bits <= 3:
        factors = factors * 0.0625
    if FORM.floats:  # codes are doubled
        factors = factors * 0.5
        whole = whole * 0.5
    return upper, lower, factors, whole
