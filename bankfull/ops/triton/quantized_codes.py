"""From words to numbers, in registers: what the kernels over quantized weights share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fraction(words, high, J: tl.constexpr, BITS: tl.constexpr, FLOATS: tl.constexpr):
    """Code j of each word (uint32) as float32, without a conversion: its bits become the mantissa of a number between
    one and two, which is 1 + code / `unit`. Codes that are floats become code / `unit` themselves."""
    if FLOATS:
        # Two codes at a time, each in the upper byte of 16 bits: shifted by one, they are float16 over 256.
        pair = words
        if J % 2 == 0:
            pair = words << 8
        halves = (pair & 0x80008000) | ((pair >> 1) & 0x3F803F80)
        if J >= 2:
            halves = halves >> 16
        found = halves.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        if BITS == 6:
            bits = (aligned(words, 4 * J, 15) & 0x00078000) | (aligned(high, 2 * J, 19) & 0x00180000)
        elif BITS == 8:
            bits = aligned(words, 8 * J, 15) & 0x007F8000
        elif J % 2 == 0:  # one shift for both codes of a byte
            bits = aligned(words, 4 * J, 15) & 0x00078000
        else:
            bits = aligned(words, 4 * J - 4, 15) & 0x00780000
        found = (bits | 0x3F800000).to(tl.float32, bitcast=True)
    return found


@triton.jit
def aligned(words, FROM: tl.constexpr, TO: tl.constexpr):
    if FROM > TO:
        moved = words >> (FROM - TO)
    else:
        moved = words << (TO - FROM)
    return moved


@triton.constexpr_function
def unit(J, BITS, FLOATS):
    """What `fraction` divides a code by."""
    return 16.0 if BITS == 4 and J % 2 == 1 and not FLOATS else 256.0


@triton.jit
def group_step(steps, outer_steps, at, outer_at, inside, NESTED: tl.constexpr):
    step = tl.load(steps + at, inside, 0).to(tl.float32)
    if NESTED:
        step = step * tl.load(outer_steps + outer_at, inside, 0.0).to(tl.float32)
    return step
