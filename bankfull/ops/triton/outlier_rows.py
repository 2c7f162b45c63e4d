"""Outlier columns in the kernels for one row: their activations are gathered by each program, and their products added
to the sums of each thread before these are reduced.

The elements of `kept` are `apart` from each other: always 1, but not known to the compiler. Otherwise it would load
several per thread, and move them to the threads whose sums they join at every tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bankfull.ops.triton.norm import weighted


@triton.jit
def load_kept(kept, output, valid, first, apart, KEPT: tl.constexpr, PLACES: tl.constexpr):
    """PLACES columns of `kept` (outputs, KEPT) from `first` on, for these outputs."""
    place = first + tl.arange(0, PLACES)
    inside = valid[:, None] & (place < KEPT)[None, :]
    return tl.load(kept + output.to(tl.int64)[:, None] * KEPT + (place * apart)[None, :], inside, 0.0)


@triton.jit
def load_numbers(columns, first, KEPT: tl.constexpr, PLACES: tl.constexpr):
    """The numbers of these columns; -1 for none."""
    place = first + tl.arange(0, PLACES)
    return tl.load(columns + place, place < KEPT, -1)


@triton.jit
def gather(x, delta, norm, inverse, offset, column, NORM: tl.constexpr, SHIFTED: tl.constexpr):
    """The activations of these columns, rounded like the others. NORM: of x + delta, whose `inverse` RMS is known."""
    kind: tl.constexpr = x.dtype.element_ty
    there = column >= 0
    numbers = tl.load(x + column, there, 0.0).to(tl.float32)
    if NORM:
        stream = (numbers + tl.load(delta + column, there, 0.0).to(tl.float32)).to(kind).to(tl.float32)
        gain = tl.load(norm + column, there, 0.0)
        numbers = weighted(stream, inverse, gain, offset, SHIFTED, kind).to(kind).to(tl.float32)
    return numbers
