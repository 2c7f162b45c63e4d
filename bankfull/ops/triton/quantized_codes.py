"""From words to numbers, in registers: what the kernels over quantized weights share."""

from __future__ import annotations

import triton
import triton.language as tl


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


@triton.jit
def group_step(steps, outer_steps, at, outer_at, inside, NESTED: tl.constexpr):
    """`inside` may be None, where everything is."""
    step = tl.load(steps + at, inside).to(tl.float32)
    if NESTED:
        step = step * tl.load(outer_steps + outer_at, inside).to(tl.float32)
    return step
