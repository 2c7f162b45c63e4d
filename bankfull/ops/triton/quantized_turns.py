"""Quantized weights times one row: a few programs that stay, and take outputs in turns.

The threads of a program share a whole row of words. Each keeps the activations of its words in registers, read (and,
where asked for, joined with a branch and normed) once. The words of the next outputs are on their way while these are
summed; the first ones are asked for before the input is there. What was asked for is not touched before its turn, not
even to convert a step: that would wait for it.

Activations are whole numbers of 16 bits, with a power of two for each group (`fixed_point`), in two planes of bytes:
one instruction multiplies four of them with four codes and adds up, exactly, so that a code takes about one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.reference.linear import Unnormed
from bankfull.ops.triton.launch import INTERPRETED, overlapped, power_of_two, processors, start_next, wait_for_inputs
from bankfull.ops.triton.pointwise import activation
from bankfull.ops.triton.quantized_layout import TOGETHER as LAID_TOGETHER
from bankfull.ops.triton.quantized_layout import Form, WordWeight
from bankfull.ops.triton.quantized_rows import neighbours, pair_of
from bankfull.ops.triton.quantized_wide_rows import more_of, spacious
from bankfull.ops.triton.sampling import best_of_parts

LONGEST = 4096
"""Words of a row, at most: eight for each of 512 threads."""
MOST_WARPS = 16
USUAL = 512
"""Words of a row of an 8B model, 4 bits each: what cuts are from."""
MANY_OUTPUTS = 65536
"""Those of a head, behind which comes nothing that is large."""
PLAIN = tl.constexpr(INTERPRETED)
"""Machine instructions are spelled out only where there is a machine for them."""
ROUND = tl.constexpr(1.5 * 2.0**23)
TOGETHER = tl.constexpr(LAID_TOGETHER)


@triton.jit
def owned(tile, outputs, R: tl.constexpr, GATE: tl.constexpr):
    """The outputs of a tile, and which of them exist; gated, half of them gates, half what passes these."""
    lanes = tl.arange(0, R)
    if GATE != "":
        pair = tile * (R // 2) + lanes % (R // 2)
        valid = pair < outputs // 2
        output = pair + lanes // (R // 2) * (outputs // 2)
    else:
        output = tile * R + lanes
        valid = output < outputs
    return output, valid


@triton.constexpr_function
def of_side(R, GATE):
    """Outputs of a tile that lie side by side."""
    return R // 2 if GATE != "" else R


@triton.jit
def asked_for(
    words,
    steps,
    lows,
    outer_steps,
    tile,
    outputs,
    NESTED: tl.constexpr,
    LOWS: tl.constexpr,
    BY_ROW: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    GATE: tl.constexpr,
    EVEN: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
    L: tl.constexpr,
):
    """The words [R, W] of a tile, and what `steps_of` makes the steps and lows of their groups from."""
    word = tl.arange(0, W)
    group = tl.arange(0, W // L)
    output, valid = owned(tile, outputs, R, GATE)
    side: tl.constexpr = of_side(R, GATE)
    # EVEN: there are whole tiles only, and where rows lie together a tile has all of them.
    if EVEN:
        there = tile * side < outputs // (R // side)
        lanes = tl.arange(0, R)
        across = outputs.to(tl.int64) // (R // side)
        at = (lanes % side)[:, None] * (GROUPS * L) + word[None, :]
        if GATE != "":
            at = at + (lanes // side).to(tl.int64)[:, None] * (across * (GROUPS * L))
        words += (tile * side).to(tl.int64) * (GROUPS * L)
        inside = tl.broadcast_to(there, [1, W])
        known = tl.broadcast_to(there, [1, W // L])
        if W != GROUPS * L:
            inside = inside & (word < GROUPS * L)[None, :]
            known = known & (group < GROUPS)[None, :]
    else:
        at = output.to(tl.int64)[:, None] * (GROUPS * L) + word[None, :]
        inside = valid[:, None] & (word < GROUPS * L)[None, :]
        known = valid[:, None] & (group < GROUPS)[None, :]
    # Read once for each row: nothing of it is worth keeping in the cache.
    codes = tl.load(words + at, inside, 0, eviction_policy="evict_first").to(tl.uint32, bitcast=True)
    step = tl.zeros([1, 1], tl.int32)
    low = step
    outer = step
    outers: tl.constexpr = GROUPS // (256 // GROUP) if NESTED else 1
    if NESTED and LOWS != 0:
        if EVEN:
            # Of T rows, step and low of two are a word, and the outer ones of each. Groups come first, so that threads
            # are laid along them, and each has what belongs to its words.
            T: tl.constexpr = min(side, TOGETHER)
            blocks = tl.arange(0, R // T)
            first = tile * side + blocks % (side // T) * T
            first = first.to(tl.int64) + (blocks // (side // T)).to(tl.int64) * across
            rows = (first // TOGETHER)[None, :, None]
            own = first % TOGETHER if T < TOGETHER else first * 0
            own = own[None, :, None]
            here = tl.broadcast_to(tl.reshape(known, [W // L, 1, 1]), [W // L, R // T, 1])
            pairs = tl.arange(0, T // 2)[None, None, :]
            at = (rows * GROUPS + group[:, None, None]) * (TOGETHER // 2) + own // 2 + pairs
            step = tl.load(steps.to(tl.pointer_type(tl.int32)) + at, here, 0)
            each = tl.arange(0, T)[None, None, :]
            at = (rows * outers + (group // (256 // GROUP))[:, None, None]) * TOGETHER + own + each
            outer = tl.load(outer_steps + at, here, 0)
        else:
            rows = output.to(tl.int64)[:, None] // TOGETHER
            own = output[:, None] % TOGETHER
            step = tl.load(steps + (rows * GROUPS + group[None, :]) * TOGETHER + own, known, 0).to(tl.int32)
            at = (rows * outers + (group // (256 // GROUP))[None, :]) * TOGETHER + own
            outer = tl.load(outer_steps + at, known, 0)
    elif not BY_ROW:
        at = output.to(tl.int64)[:, None] * GROUPS + group[None, :]
        step = tl.load(steps + at, known, 0)
        if NESTED:
            at = output.to(tl.int64)[:, None] * outers + (group // (256 // GROUP))[None, :]
            outer = tl.load(outer_steps + at, known, 0)
        if LOWS != 0:
            low = tl.load(lows + at, known, 0)
    return codes, step, low, outer


@triton.jit
def bytes_as_floats(words):
    """Each byte of a word (int32), the lowest first, as a float32. None is converted, which would be slow: it becomes
    the end of a float32 that is 2 ** 23 larger."""
    if PLAIN:
        a, b, c, d = words & 255, (words >> 8) & 255, (words >> 16) & 255, (words >> 24) & 255
        a, b, c, d = a.to(tl.float32), b.to(tl.float32), c.to(tl.float32), d.to(tl.float32)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            "prmt.b32 $0, $4, 0x4B000000, 0x7540; prmt.b32 $1, $4, 0x4B000000, 0x7541;"
            " prmt.b32 $2, $4, 0x4B000000, 0x7542; prmt.b32 $3, $4, 0x4B000000, 0x7543;",
            "=&r,=&r,=&r,=&r,r",
            [words],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
        a, b, c, d = a - 8388608.0, b - 8388608.0, c - 8388608.0, d - 8388608.0
    return a, b, c, d


@triton.jit
def halves_as_floats(words):
    """The two float16 of a word (int32)."""
    if PLAIN:
        low = (words & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        return low, ((words >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }",
            "=&r,=&r,r",
            [words],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )


@triton.jit
def by_rows(x, R: tl.constexpr, T: tl.constexpr, G: tl.constexpr):
    """[G, R / T, T] as [R, G]."""
    return tl.reshape(tl.permute(tl.reshape(x, [G, R // T, T]), (1, 2, 0)), [R, G])


@triton.jit
def steps_of(
    step,
    low,
    outer,
    NESTED: tl.constexpr,
    LOWS: tl.constexpr,
    EVEN: tl.constexpr,
    GATE: tl.constexpr,
    R: tl.constexpr,
    G: tl.constexpr,
):
    """Steps and lows, [R, G] float32; lows with their sign. Without lows the second is nothing to use."""
    if NESTED and LOWS != 0:
        T: tl.constexpr = min(of_side(R, GATE), TOGETHER)
        outer_step, outer_low = halves_as_floats(outer)
        small, small_low, other, other_low = bytes_as_floats(step)
        if EVEN:
            small, small_low = by_rows(tl.join(small, other), R, T, G), by_rows(tl.join(small_low, other_low), R, T, G)
            outer_step, outer_low = by_rows(outer_step, R, T, G), by_rows(outer_low, R, T, G)
        return small * outer_step, LOWS * (small_low * outer_low)
    else:
        steps = step.to(tl.float32)
        if NESTED:
            steps = steps * outer.to(tl.float32)
        return steps, LOWS * low.to(tl.float32)


@triton.jit
def gains_of(norm, groups, columns, GROUP: tl.constexpr, W: tl.constexpr, L: tl.constexpr, PADDED: tl.constexpr):
    """The norm's weight, in the order of `line_of`."""
    word = tl.arange(0, W)
    pair = word // L * (GROUP // 2) + word % L
    found = ()
    for i in tl.static_range(GROUP // L // 2):
        even, odd = pair_of(norm, pair + i * L, word < groups * L, columns, PADDED)
        found = more_of(more_of(found, even), odd)
    return found


@triton.jit
def rounded(even, odd, KIND: tl.constexpr):
    """Two float32 as KIND has them, and as the word that holds both. Two at a time are converted fast, one is not."""
    if PLAIN:
        low = even.to(KIND)
        high = odd.to(KIND)
        bits = low.to(tl.uint16, bitcast=True).to(tl.uint32) | (high.to(tl.uint16, bitcast=True).to(tl.uint32) << 16)
        return low.to(tl.float32), high.to(tl.float32), bits
    elif spacious(KIND):
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $2, $4, $3; shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;",
            "=&r,=&r,=&r,r,r",
            [even, odd],
            dtype=(tl.float32, tl.float32, tl.uint32),
            is_pure=True,
            pack=1,
        )
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; cvt.rn.f16x2.f32 $2, $4, $3; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low;"
            " cvt.f32.f16 $1, high; }",
            "=&r,=&r,=&r,r,r",
            [even, odd],
            dtype=(tl.float32, tl.float32, tl.uint32),
            is_pure=True,
            pack=1,
        )


@triton.jit
def line_of(
    x,
    delta,
    joined,
    gains,
    eps,
    offset,
    groups,
    columns,
    GROUP: tl.constexpr,
    W: tl.constexpr,
    L: tl.constexpr,
    PADDED: tl.constexpr,
    NORM: tl.constexpr,
    SHIFTED: tl.constexpr,
):
    """The activations of each thread's words, two (float32 [W]) for each pair of codes. NORM: of x + delta, which the
    first program leaves in `joined`, normed; rounded where the operations apart from each other round."""
    kind: tl.constexpr = x.dtype.element_ty
    word = tl.arange(0, W)
    pair = word // L * (GROUP // 2) + word % L
    inside = word < groups * L
    found = ()
    pairs = ()
    squares = tl.zeros([W], tl.float32)
    for i in tl.static_range(GROUP // L // 2):
        even, odd = pair_of(x, pair + i * L, inside, columns, PADDED)
        if NORM:
            more_even, more_odd = pair_of(delta, pair + i * L, inside, columns, PADDED)
            even, odd, both = rounded(even + more_even, odd + more_odd, kind)
            pairs = more_of(pairs, both)
            squares += even * even + odd * odd
        found = more_of(more_of(found, even), odd)
    if NORM:
        if tl.program_id(0) == 0:
            leave(joined, pairs, pair, inside, columns, L, PADDED)
        scale = tl.rsqrt(tl.sum(squares, 0) / columns + eps)
        normed = ()
        for i in tl.static_range(GROUP // L // 2):
            even = found[2 * i] * scale
            odd = found[2 * i + 1] * scale
            if SHIFTED:
                even, odd, both = rounded(even * (offset + gains[2 * i]), odd * (offset + gains[2 * i + 1]), kind)
            else:
                even, odd, both = rounded(even, odd, kind)
                even, odd, both = rounded(even * gains[2 * i], odd * gains[2 * i + 1], kind)
            normed = more_of(more_of(normed, even), odd)
        found = normed
    return found


@triton.jit
def leave(joined, pairs, pair, inside, columns, L: tl.constexpr, PADDED: tl.constexpr):
    """Store the words that `rounded` made, two numbers each."""
    for i in tl.static_range(len(pairs)):
        if PADDED:
            column = 2 * (pair + i * L)
            halves = joined.to(tl.pointer_type(tl.uint16))
            tl.store(halves + column, pairs[i].to(tl.uint16), inside & (column < columns))
            tl.store(halves + column + 1, (pairs[i] >> 16).to(tl.uint16), inside & (column + 1 < columns))
        else:
            tl.store(joined.to(tl.pointer_type(tl.uint32)) + pair + i * L, pairs[i], inside)


@triton.jit
def sum_of(line, W: tl.constexpr, L: tl.constexpr):
    """Over each group, [W / L, 1]: what zeros and lows are multiplied with."""
    whole = tl.zeros([W], tl.float32)
    for i in tl.static_range(len(line)):
        whole += line[i]
    return tl.sum(tl.reshape(whole, [W // L, L]), 1, keep_dims=True)


@triton.jit
def fixed_point(line, W: tl.constexpr, L: tl.constexpr):
    """Activations as whole numbers in the lower 16 bits of words, and the power of two, [W / L, 1], that a group's have
    in common. Numbers of 16 bits that are at least a 128th (of float16, a 16th) of their group's largest keep all their
    digits; of others what is lost is less than the last digit of the largest. No instruction converts, which would be
    slow: where ROUND is added, what is behind the point falls off, and the rest stands in the lowest bits."""
    most = tl.zeros([W], tl.float32)
    for i in tl.static_range(len(line)):
        most = tl.maximum(most, tl.abs(line[i]), propagate_nan=tl.PropagateNan.ALL)
    most = tl.max(tl.reshape(most, [W // L, L]), 1, keep_dims=True)
    # 2 ** e <= most < 2 ** (e + 1), as it stands in the exponent, within bounds in which both factors are normal.
    exponents = tl.minimum(tl.maximum(most.to(tl.int32, bitcast=True) >> 23, 15), 254)
    up = ((127 + 14 + 127 - exponents) << 23).to(tl.float32, bitcast=True)
    factors = tl.where(most < float("inf"), ((exponents - 14) << 23).to(tl.float32, bitcast=True), float("nan"))
    of_words = tl.reshape(tl.broadcast_to(up, [W // L, L]), [W])
    found = ()
    for i in tl.static_range(len(line)):
        found = more_of(found, (line[i] * of_words + ROUND).to(tl.int32, bitcast=True))
    return found, factors


@triton.jit
def four_bytes(a, b, c, d, BYTE: tl.constexpr):
    """The lowest byte of each, or the one above it, side by side."""
    if PLAIN:
        low = ((a >> (8 * BYTE)) & 255) | (((b >> (8 * BYTE)) & 255) << 8)
        return low | (((c >> (8 * BYTE)) & 255) << 16) | (((d >> (8 * BYTE)) & 255) << 24)
    elif BYTE == 0:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 low, high; prmt.b32 low, $1, $2, 0x0040; prmt.b32 high, $3, $4, 0x0040;"
            " prmt.b32 $0, low, high, 0x5410; }",
            "=r,r,r,r,r",
            [a, b, c, d],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 low, high; prmt.b32 low, $1, $2, 0x0051; prmt.b32 high, $3, $4, 0x0051;"
            " prmt.b32 $0, low, high, 0x5410; }",
            "=r,r,r,r,r",
            [a, b, c, d],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def planes(numbers, BYTE: tl.constexpr):
    """The upper (1) or lower bytes of the activations of a word, four together, in the order of `bytes_of`."""
    if len(numbers) == 8:
        first = four_bytes(numbers[0], numbers[4], numbers[1], numbers[5], BYTE)
        return first, four_bytes(numbers[2], numbers[6], numbers[3], numbers[7], BYTE)
    else:
        return (four_bytes(numbers[0], numbers[2], numbers[1], numbers[3], BYTE),)


@triton.jit
def bytes_of(codes, BITS: tl.constexpr):
    """The codes of a word, each in a byte of its own."""
    if BITS == 4:
        return codes & 0x0F0F0F0F, (codes >> 4) & 0x0F0F0F0F
    else:
        return (codes,)


@triton.jit
def multiplied(codes, numbers, sums, SIGNED: tl.constexpr):
    """`sums` and the products of four codes with four bytes."""
    if PLAIN:
        for i in tl.static_range(4):
            number = (numbers >> (8 * i)) & 255
            if SIGNED:
                number = (number ^ 128) - 128
            sums += ((codes >> (8 * i)) & 255).to(tl.int32) * number
        return sums
    elif SIGNED:
        return tl.inline_asm_elementwise(
            "dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", [codes, numbers, sums], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            "dp4a.u32.u32 $0, $1, $2, $3;", "=r,r,r,r", [codes, numbers, sums], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def neighbours_apart(x, R: tl.constexpr, W: tl.constexpr, RUN: tl.constexpr):
    """[R, W] as RUN tensors [R, W / RUN]: the first of each run of neighbours, the second, ..."""
    if RUN == 4:
        even, odd = tl.split(tl.reshape(x, [R, W // 4, 2, 2]))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        return first, second, third, fourth
    else:
        tl.static_assert(RUN == 2)
        return tl.split(tl.reshape(x, [R, W // 2, 2]))


@triton.jit
def planes_apart(planes, W: tl.constexpr, RUN: tl.constexpr):
    """For each neighbour of a run its planes, one behind the other, [1, W / RUN] each."""
    first = neighbours_apart(planes[0][None, :], 1, W, RUN)
    found = ()
    if len(planes) == 2:
        second = neighbours_apart(planes[1][None, :], 1, W, RUN)
        for i in tl.static_range(RUN):
            found = more_of(more_of(found, first[i]), second[i])
    else:
        for i in tl.static_range(RUN):
            found = more_of(found, first[i])
    return found


@triton.jit
def products(
    upper,
    lower,
    factors,
    whole,
    codes,
    step,
    low,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    LOWS: tl.constexpr,
    BY_ROW: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
    L: tl.constexpr,
):
    """The sum of each output, [R]. Sums are exact as long as they are whole numbers: of a thread's words of a group."""
    run: tl.constexpr = neighbours(L)
    words = neighbours_apart(codes, R, W, run)
    high = tl.zeros([R, W // run], tl.int32)
    rest = tl.zeros([R, W // run], tl.int32)
    for i in tl.static_range(run):
        apart = bytes_of(words[i], BITS)
        for j in tl.static_range(len(apart)):
            high = multiplied(apart[j], upper[i * len(apart) + j], high, True)
            rest = multiplied(apart[j], lower[i * len(apart) + j], rest, False)
    exact = high * 256 + rest
    found = tl.reshape(exact.to(tl.float32), [R, W // L, L // run]) * tl.reshape(factors, [1, W // L, 1])
    # A group's zero is taken from one of its threads' sums, and its low given to one.
    first = (tl.arange(0, L // run) == 0)[None, None, :]
    if ZERO != 0:
        found -= tl.where(first, ZERO * tl.reshape(whole, [1, W // L, 1]), 0.0)
    if not BY_ROW:
        found = found * step[:, :, None]
        if LOWS != 0:
            found += tl.where(first, low[:, :, None] * tl.reshape(whole, [1, W // L, 1]), 0.0)
    return tl.sum(tl.reshape(found, [R, W // run]), 1)


@triton.jit
def turns_kernel(
    x,
    delta,
    joined,
    norm,
    eps,
    offset,
    bias,
    y,
    places,
    words,
    high,
    steps,
    lows,
    outer_steps,
    outputs,
    columns,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    FLOATS: tl.constexpr,
    NESTED: tl.constexpr,
    LOWS: tl.constexpr,
    BY_ROW: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATE: tl.constexpr,
    BEST: tl.constexpr,
    NORM: tl.constexpr,
    SHIFTED: tl.constexpr,
    GROUPS: tl.constexpr,
    EVEN: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
    L: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """BEST: of its outputs a program stores the highest, in `y`, and in `places` the first one that is so high; a NaN
    counts as infinity."""
    start_next(OVERLAP)
    tile = tl.program_id(0)
    # What never changes is under way before the activations are there.
    codes, raw_step, raw_low, raw_outer = asked_for(
        words, steps, lows, outer_steps, tile, outputs, NESTED, LOWS, BY_ROW, GROUP, GROUPS, GATE, EVEN, R, W, L
    )
    of_row = tl.zeros([R], tl.float32)
    if BY_ROW:
        output, valid = owned(tile, outputs, R, GATE)
        of_row = tl.load(steps + output, valid, 0.0)
    gains = ()
    if NORM:
        gains = gains_of(norm, GROUPS, columns, GROUP, W, L, PADDED)
    wait_for_inputs(OVERLAP)
    line = line_of(x, delta, joined, gains, eps, offset, GROUPS, columns, GROUP, W, L, PADDED, NORM, SHIFTED)
    whole = sum_of(line, W, L)
    numbers, factors = fixed_point(line, W, L)
    upper = planes_apart(planes(numbers, 1), W, neighbours(L))
    lower = planes_apart(planes(numbers, 0), W, neighbours(L))
    kind = x.dtype.element_ty
    top = tl.full([R], -float("inf"), tl.float32)
    place = tl.zeros([R], tl.int32)
    tiles = tl.cdiv(outputs, R)
    while tile < tiles:
        own, exist = owned(tile, outputs, R, GATE)
        tile_now = tile
        tile += tl.num_programs(0)
        next_codes, next_step, next_low, next_outer = asked_for(
            words, steps, lows, outer_steps, tile, outputs, NESTED, LOWS, BY_ROW, GROUP, GROUPS, GATE, EVEN, R, W, L
        )
        step, low = raw_step, raw_low
        if not BY_ROW:
            step, low = steps_of(raw_step, raw_low, raw_outer, NESTED, LOWS, EVEN, GATE, R, W // L)
        result = products(upper, lower, factors, whole, codes, step, low, BITS, ZERO, LOWS, BY_ROW, R, W, L)
        if BY_ROW:
            result = result * of_row
            ahead, valid = owned(tile, outputs, R, GATE)
            of_row = tl.load(steps + ahead, valid, 0.0)
        if HAS_BIAS:
            result += tl.load(bias + own, exist, 0.0).to(tl.float32)
        if GATE != "":
            gate, passing = tl.split(tl.trans(tl.reshape(result.to(kind).to(tl.float32), [2, R // 2])))
            opened = activation(gate, GATE).to(kind).to(tl.float32)
            at = tile_now * (R // 2) + tl.arange(0, R // 2)
            tl.store(y + at, (opened * passing).to(kind), at < outputs // 2)
        elif BEST:
            score = result.to(kind).to(tl.float32)
            score = tl.where(score == score, score, float("inf"))
            better = exist & (score > top)
            top = tl.where(better, score, top)
            place = tl.where(better, own, place)
        else:
            tl.store(y + own, result.to(kind), exist)
        codes, raw_step, raw_low, raw_outer = next_codes, next_step, next_low, next_outer
    if BEST:
        highest = tl.max(top, 0)
        tl.store(y + tl.program_id(0), highest)
        tl.store(places + tl.program_id(0), tl.min(tl.where(top == highest, place, outputs), 0))


@dataclass(frozen=True, slots=True)
class Turns:
    """How a weight is shared out."""

    outputs: int
    """Of a tile."""
    programs: int
    """For each multiprocessor."""
    groups: int = 1
    """Of threads in a program, each with whole rows of its own."""
    words: int = 4
    """Of a row that a thread holds."""
    registers: int | None = None
    """Of a thread, at most."""


def takes(form: Form, columns: int, dtype: torch.dtype | None) -> bool:
    """Numbers of 16 bits, that a fixed point serves as well, and codes that are whole numbers in bytes or halves."""
    plain = form.bits in (4, 8) and not form.floats
    return plain and dtype in (torch.bfloat16, torch.float16) and columns <= LONGEST * form.per_word


def pays(form: Form, columns: int, dtype: torch.dtype | None) -> bool:
    """Is it faster than programs that come and go? On an H200, in a chain of the layers of an 8B model, it is, but for
    long rows of bytes. Rows that are shorter than that model's were not measured."""
    return takes(form, columns, dtype) and 2048 <= columns <= (LONGEST * 8 if form.bits == 4 else 8192)


def turns_for(weight: WordWeight, normed: bool = False) -> Turns:
    """The fastest in such a chain. Warps count most: as many as the registers hold, if the compiler is told so. Next to
    that few programs, since each reads and norms all activations, and tiles that come out even."""
    outputs, columns = weight.shape
    if weight.form.bits == 4 and weight.form.paired:
        return Turns(8, 1) if columns > 8192 else Turns(4, 4) if outputs <= 4096 else Turns(8, 4)
    if weight.form.bits == 4 and weight.form.nested:  # two narrow loads for each group: two programs hide them best
        return Turns(2, 2, words=16) if columns > 8192 else Turns(16, 2)
    if weight.form.bits == 4 and weight.group < 128:  # steps of many groups take registers, too
        if columns > 8192:
            return Turns(4, 1)
        return Turns(16, 3) if outputs >= MANY_OUTPUTS else Turns(8, 3) if outputs >= 16384 else Turns(4, 3)
    if weight.form.bits == 4:
        if columns > 8192:
            return Turns(4, 2, words=8, registers=128)
        if outputs >= MANY_OUTPUTS:
            return Turns(16, 3)
        if outputs >= 16384:
            return Turns(8, 4, registers=128)
        return Turns(8, 2, groups=2) if normed else Turns(4, 6, words=8)
    return Turns(4, 4) if outputs >= MANY_OUTPUTS else Turns(8, 3) if outputs <= 4096 else Turns(4, 3)


def one_row(
    x: Tensor | Unnormed, weight: WordWeight, bias: Tensor | None, gate: str = "", cut: Turns | None = None
) -> Tensor:
    """x (1, columns), dense, times the weight; with `gate`, gated."""
    return _launched(x, weight, bias, gate, False, cut)[0]


def best_of_row(x: Tensor | Unnormed, weight: WordWeight, bias: Tensor | None, cut: Turns | None = None) -> Tensor:
    """Which output of `one_row` is highest: no output is stored, but the best one of each program."""
    return best_of_parts(*_launched(x, weight, bias, "", True, cut), weight.shape[0])


def _even(form: Form, outputs: int, tile: int, gated: bool) -> bool:
    """Are there whole tiles only, and begins each side of a gated one where rows that lie together do?"""
    sides = 2 if gated else 1
    if outputs % tile or (form.paired and tile // sides < 2):
        return False
    return not form.paired or (outputs // sides) % LAID_TOGETHER == 0


def _launched(
    x: Tensor | Unnormed, weight: WordWeight, bias: Tensor | None, gate: str, best: bool, cut: Turns | None
) -> tuple[Tensor, Tensor]:
    """The outputs; or the highest of each program's, and which they are."""
    before = x if isinstance(x, Unnormed) else None
    row = x.x if isinstance(x, Unnormed) else x
    outputs, columns = weight.shape
    cut = cut or turns_for(weight, before is not None)
    length = weight.group // weight.form.per_word
    width = max(length, power_of_two(weight.words.shape[1]))
    warps = min(MOST_WARPS, cut.groups * max(1, width // (32 * cut.words)))
    # Short rows have small programs, of which more fit than of those that the cuts are from.
    more = max(1, cut.groups * USUAL // (32 * cut.words) // warps)
    programs = min(triton.cdiv(outputs, cut.outputs), cut.programs * more * processors(row.device))
    if best:
        y = torch.empty(1, programs, dtype=torch.float32, device=row.device)
        places = torch.empty(1, programs, dtype=torch.int32, device=row.device)
    else:
        y = places = torch.empty(1, outputs // 2 if gate else outputs, dtype=row.dtype, device=row.device)
    delta, joined, norm, eps, offset = (
        (row, y, y, 0.0, 0.0)
        if before is None
        else (before.delta, before.joined, before.weight, before.eps, before.offset)
    )
    bounded = {} if cut.registers is None or INTERPRETED else {"maxnreg": cut.registers}
    turns_kernel[(programs,)](
        row,
        delta,
        joined,
        norm,
        eps,
        offset,
        row if bias is None else bias,
        y,
        places,
        *weight.tensors(),
        outputs,
        columns,
        **weight.constants(),
        HAS_BIAS=bias is not None,
        GATE=gate,
        BEST=best,
        NORM=before is not None,
        SHIFTED=offset != 0.0,
        GROUPS=weight.groups,
        EVEN=_even(weight.form, outputs, cut.outputs, bool(gate)),
        R=cut.outputs,
        W=width,
        L=length,
        num_warps=warps,
        **bounded,
        **overlapped(row),
    )
    return y, places
