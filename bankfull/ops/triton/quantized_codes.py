"""From words to numbers, in registers: what the kernels over quantized weights share."""

from __future__ import annotations

import triton
import triton.language as tl

from bankfull.ops.triton.quantized_layout import TOGETHER


@triton.jit
def tiny(words, high, J: tl.constexpr, BITS: tl.constexpr, FLOATS: tl.constexpr):
    """Code j of each word (uint32) as float32, times 2 ** -`exponent`.

    Nothing is converted. Bits below the exponent of a float32 are a number already, if a tiny one: masked where they
    lie, codes only wait for a factor that makes them large again, and there is always one that they can share. That is
    one instruction for most codes; the hardware is as fast with such numbers as with others.
    """
    if FLOATS:
        # Sign, exponent and mantissa go where a float32 has them: the sign is repeated on the way, and masked out.
        moved = (words << (24 - 8 * J)).to(tl.int32, bitcast=True) >> 4
        found = (moved & -0x78100000).to(tl.float32, bitcast=True)
    elif BITS == 8:
        found = masked(words, 8 * J, 8, 16)
    else:
        found = masked(words, 4 * J, 4, 12)
        if BITS == 6:
            found += masked(high, 2 * J, 2, 12) * power(4 + place(J, BITS) - 2 * J)
    return found


@triton.jit
def masked(words, FROM: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr):
    """Bits that would reach into the exponent are shifted first: one shift for all of a word's."""
    moved: tl.constexpr = SHIFT if FROM + WIDTH > 23 else 0
    bits = (words >> moved) & (((1 << WIDTH) - 1) << (FROM - moved))
    return bits.to(tl.float32, bitcast=True)


@triton.constexpr_function
def place(J, BITS):
    """The lowest bit of code j, where `tiny` masks it."""
    if BITS == 8:
        return 8 * (J % 2)
    return 4 * J if J <= 4 else 4 * J - 12


@triton.constexpr_function
def exponent(J, BITS, FLOATS):
    return 120 if FLOATS else 149 - place(J, BITS)


@triton.constexpr_function
def power(n):
    return 2.0**n


ROWS_TOGETHER = tl.constexpr(TOGETHER)


@triton.jit
def small_and_outer(bits, outer):
    """A small integer times the float16 in the lower half of a word."""
    return bits.to(tl.float32) * outer.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def steps_and_lows(
    steps,
    lows,
    outer_steps,
    output,
    group,
    groups,
    inside,
    NESTED: tl.constexpr,
    LOWS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Of groups (a row) of outputs (a column, int64), as float32, lows with their sign; without lows the second is
    nothing to use. `inside` may be None, where everything is."""
    # Outer steps cover 256 columns.
    outers = groups // (256 // GROUP)
    outer = group // (256 // GROUP)
    if NESTED and LOWS != 0:
        rows, own = output // ROWS_TOGETHER, output % ROWS_TOGETHER
        pair = tl.load(steps + (rows * groups + group) * ROWS_TOGETHER + own, inside).to(tl.uint16, bitcast=True)
        over = tl.load(outer_steps + (rows * outers + outer) * ROWS_TOGETHER + own, inside).to(tl.uint32, bitcast=True)
        step = small_and_outer(pair & 255, over & 0xFFFF)
        low = LOWS * small_and_outer(pair >> 8, over >> 16)
    else:
        step = tl.load(steps + output * groups + group, inside).to(tl.float32)
        if NESTED:
            step = step * tl.load(outer_steps + output * outers + outer, inside).to(tl.float32)
        low = step
        if LOWS != 0:
            low = LOWS * tl.load(lows + output * groups + group, inside).to(tl.float32)
    return step, low
