"""Decoding of packed codes in registers, shared by the kernels over quantized weights."""

from __future__ import annotations

import triton
import triton.language as tl

from bankfull.ops.triton.quantized_layout import INTERLEAVED_ROWS


@triton.jit
def subnormal(words, high, J: tl.constexpr, BITS: tl.constexpr, FLOATS: tl.constexpr):
    """Code j of each word (uint32) as float32, times 2 ** -`exponent`.

    No conversion instruction is needed. Bits below the exponent field of a float32 form a subnormal number: masked in
    place, codes only need a power of two to scale them up, and the kernels apply it together with another factor. This
    takes one instruction for most codes; the hardware handles subnormals at full speed. 8-bit integers are stored
    signed and become unsigned first, by one instruction per word.
    """
    if FLOATS:
        # Sign, exponent and mantissa move to their float32 positions; the shift repeats the sign, which is masked out.
        moved = (words << (24 - 8 * J)).to(tl.int32, bitcast=True) >> 4
        found = (moved & -0x78100000).to(tl.float32, bitcast=True)
    elif BITS == 8:
        found = masked(words ^ 0x80808080, 8 * J, 8, 16)
    else:
        found = masked(words, 4 * J, 4, 12)
        if BITS == 6:
            found += masked(high, 2 * J, 2, 12) * power(4 + place(J, BITS) - 2 * J)
    return found


@triton.jit
def masked(words, FROM: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr):
    """Bits that would reach the exponent field are shifted down first, by one shift per word."""
    moved: tl.constexpr = SHIFT if FROM + WIDTH > 23 else 0
    bits = (words >> moved) & (((1 << WIDTH) - 1) << (FROM - moved))
    return bits.to(tl.float32, bitcast=True)


@triton.constexpr_function
def place(J, BITS):
    """Lowest bit of code j after the mask in `subnormal`."""
    if BITS == 8:
        return 8 * (J % 2)
    return 4 * J if J <= 4 else 4 * J - 12


@triton.constexpr_function
def exponent(J, BITS, FLOATS):
    return 120 if FLOATS else 149 - place(J, BITS)


@triton.constexpr_function
def power(n):
    return 2.0**n


INTERLEAVE = tl.constexpr(INTERLEAVED_ROWS)


@triton.jit
def nested_scale(bits, outer):
    """A small integer times the float16 in the lower half of a word."""
    return bits.to(tl.float32) * outer.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def scales_and_minima(
    scales,
    minima,
    outer_scales,
    output,
    group,
    groups,
    inside,
    NESTED: tl.constexpr,
    MINIMA: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Scales and minima (signed) as float32 for groups (a row) of outputs (a column, int64); without minima the second
    result is unused. `inside` may be None if everything is in bounds."""
    # Outer scales cover 256 columns.
    outers = groups // (256 // GROUP)
    outer = group // (256 // GROUP)
    if NESTED and MINIMA != 0:
        rows, own = output // INTERLEAVE, output % INTERLEAVE
        pair = tl.load(scales + (rows * groups + group) * INTERLEAVE + own, inside).to(tl.uint16, bitcast=True)
        over = tl.load(outer_scales + (rows * outers + outer) * INTERLEAVE + own, inside).to(tl.uint32, bitcast=True)
        scale = nested_scale(pair & 255, over & 0xFFFF)
        minimum = MINIMA * nested_scale(pair >> 8, over >> 16)
    else:
        scale = tl.load(scales + output * groups + group, inside).to(tl.float32)
        if NESTED:
            scale = scale * tl.load(outer_scales + output * outers + outer, inside).to(tl.float32)
        minimum = scale
        if MINIMA != 0:
            minimum = MINIMA * tl.load(minima + output * groups + group, inside).to(tl.float32)
    return scale, minimum
