"""Decoding of packed codes in registers, shared by the kernels over quantized weights."""

from __future__ import annotations

import triton
import triton.language as tl

from bankfull.ops.products.triton.quantized.layout import INTERLEAVED_ROWS, THIRD_BITS


@triton.jit
def subnormal(words, high, J: tl.constexpr, FORM: tl.constexpr):
    """Code j of each word (uint32) as float32, times 2 ** -`exponent`.

    No conversion instruction is needed. Bits below the exponent field of a float32 form a subnormal number: masked in
    place, codes only need a power of two to scale them up, and the kernels apply it together with another factor. This
    takes one instruction for most codes; the hardware handles subnormals at full speed. 8-bit integers are stored
    signed and become unsigned first, by one instruction per word.
    """
    if FORM.floats:
        # Sign, exponent and mantissa move to their float32 positions; the shift repeats the sign, which is masked out.
        if FORM.bits == 8:
            moved = (words << (24 - 8 * J)).to(tl.int32, bitcast=True) >> 4
            found = (moved & -0x78100000).to(tl.float32, bitcast=True)
        else:
            moved = (words << (28 - 4 * J)).to(tl.int32, bitcast=True) >> 6
            found = (moved & -0x7E400000).to(tl.float32, bitcast=True)
    elif FORM.bits == 8:
        found = masked(words ^ 0x80808080, 8 * J, 8, 16)
    elif FORM.bits <= 3:
        found = masked(words, 2 * J, 2, 12)
        if FORM.bits == 3:
            third: tl.constexpr = third_bit(J)
            lowered: tl.constexpr = third - 12 if third > 22 else third
            found += masked(high, third, 1, 12) * power(2 + place(J, FORM.bits) - lowered)
    else:
        found = masked(words, 4 * J, 4, 12)
        if FORM.bits == 6:
            found += masked(high, 2 * J, 2, 12) * power(4 + place(J, FORM.bits) - 2 * J)
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
    if BITS <= 3:
        return 2 * J if J <= 10 else 2 * J - 12
    return 4 * J if J <= 4 else 4 * J - 12


@triton.constexpr_function
def third_bit(J):
    """Place of the third bit of code j of a word, after `third_bits`."""
    return 8 * (J // 4) + THIRD_BITS[J % 4]


@triton.constexpr_function
def exponent(J, BITS, FLOATS):
    if FLOATS:
        return 120 if BITS == 8 else 126
    return 149 - place(J, BITS)


@triton.constexpr_function
def power(n):
    return 2.0**n


@triton.jit
def third_bits(of_pairs, R: tl.constexpr, W: tl.constexpr):
    """The words of third bits, [R, W / 2], for each word of codes: those of the second word of two move down by one
    bit."""
    both = tl.reshape(tl.broadcast_to(of_pairs[:, :, None], [R, W // 2, 2]), [R, W])
    return both.to(tl.uint32, bitcast=True) >> (tl.arange(0, W) % 2).to(tl.uint32)[None, :]


INTERLEAVE = tl.constexpr(INTERLEAVED_ROWS)


@triton.jit
def as_scale(stored):
    """A group's scale as float32; a byte is the exponent of a power of two, plus 127."""
    if stored.dtype == tl.uint8:
        return (stored.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        return stored.to(tl.float32)


@triton.jit
def as_minimum(stored, scale, MINIMA: tl.constexpr):
    """A group's minimum (signed) as float32; a byte is a zero point."""
    if stored.dtype == tl.uint8:
        return -scale * stored.to(tl.float32)
    else:
        return MINIMA * stored.to(tl.float32)


@triton.jit
def nested_scale(bits, outer):
    """A small integer times the float16 in the lower half of a word."""
    return bits.to(tl.float32) * outer.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def load_or_zero(at, inside):
    """`inside` may be None if everything is in bounds."""
    if inside is None:
        return tl.load(at)
    else:
        return tl.load(at, inside, 0)


@triton.jit
def stored_scales(words, output, group, inside, FORM: tl.constexpr):
    """Scales, minima and outer scales as they are stored, for groups of outputs (int64); one of the two is a row, the
    other a column. What a format lacks is a copy of its scales."""
    # Outer scales cover 256 columns.
    outers = words.groups // (256 // FORM.group)
    outer = group // (256 // FORM.group)
    if FORM.nested and FORM.minima != 0:
        rows, own = output // INTERLEAVE, output % INTERLEAVE
        scale = load_or_zero(words.scales + (rows * words.groups + group) * INTERLEAVE + own, inside)
        minimum = scale
        above = load_or_zero(words.outer_scales + (rows * outers + outer) * INTERLEAVE + own, inside)
    else:
        scale = load_or_zero(words.scales + output * words.groups + group, inside)
        minimum = scale
        above = scale
        if FORM.nested:
            above = load_or_zero(words.outer_scales + output * outers + outer, inside)
        if FORM.minima != 0:
            minimum = load_or_zero(words.minima + output * words.groups + group, inside)
    return scale, minimum, above


@triton.jit
def scales_of(scale, minimum, above, FORM: tl.constexpr):
    """What `stored_scales` has loaded as float32: scales and minima (signed); without minima the second result is
    unused."""
    if FORM.nested and FORM.minima != 0:
        pair, over = scale.to(tl.uint16, bitcast=True), above.to(tl.uint32, bitcast=True)
        found = nested_scale(pair & 255, over & 0xFFFF)
        return found, FORM.minima * nested_scale(pair >> 8, over >> 16)
    else:
        found = as_scale(scale)
        if FORM.nested:
            found = found * above.to(tl.float32)
        if FORM.minima != 0:
            return found, as_minimum(minimum, found, FORM.minima)
        else:
            return found, found


@triton.jit
def scales_and_minima(words, output, group, inside, FORM: tl.constexpr):
    """`stored_scales`, as float32."""
    scale, minimum, above = stored_scales(words, output, group, inside, FORM)
    return scales_of(scale, minimum, above, FORM)
