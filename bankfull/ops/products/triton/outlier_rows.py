"""Outlier columns in the kernels for one row: their activations are gathered by each program, and their products added
to the sums of each thread before these are reduced.

`kept` begins at `start`: always 0, but not known to the compiler. So it assumes no alignment and loads one element per
thread; otherwise it would load several, and move the sums to these threads at every tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bankfull.ops.norm.triton import weighted
from bankfull.ops.products.triton.tile_outputs import outputs_per_side, tile_outputs


@triton.jit
def load_kept(kept, output, valid, first, start, KEPT: tl.constexpr, PLACES: tl.constexpr):
    """PLACES columns of `kept` (outputs, KEPT) from `first` on, for these outputs."""
    place = first + tl.arange(0, PLACES)
    inside = valid[:, None] & (place < KEPT)[None, :]
    return tl.load(kept + start + output.to(tl.int64)[:, None] * KEPT + place[None, :], inside, 0.0)


@triton.jit
def load_kept_tile(
    kept,
    start,
    tile,
    outputs,
    KEPT: tl.constexpr,
    PLACES: tl.constexpr,
    GATE: tl.constexpr,
    EVEN: tl.constexpr,
    R: tl.constexpr,
):
    """All columns of `kept` for the outputs of a tile (`tile_outputs`). EVEN: tiles divide the outputs. Offsets inside
    of a tile are the same for every tile, so that only one address is computed for each."""
    side: tl.constexpr = outputs_per_side(R, GATE)
    lanes = tl.arange(0, R)
    place = tl.arange(0, PLACES)
    within = (lanes % side)[:, None] * KEPT + place[None, :]
    if GATE != "":
        within += (lanes // side)[:, None] * (outputs // 2 * KEPT)
    if EVEN:
        inside = (place < KEPT) & (tile * side < outputs // (R // side))
        inside = tl.broadcast_to(inside[None, :], [R, PLACES])
    else:
        _, valid = tile_outputs(tile, outputs, R, GATE)
        inside = valid[:, None] & (place < KEPT)[None, :]
    return tl.load(kept + start + (tile * side).to(tl.int64) * KEPT + within, inside, 0.0)


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
