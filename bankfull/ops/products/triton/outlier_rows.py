"""Outlier columns in the kernels for one row: their activations are gathered by each program, and their products added
to the sums of each thread before these are reduced.

`kept` begins at `start`: always 0, but not known to the compiler. So it assumes no alignment and loads one element per
thread; otherwise it would load several, and move the sums to these threads at every tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bankfull.ops.norm.triton import weighted
from bankfull.ops.products.triton.tile_outputs import tile_outputs


@triton.jit
def load_kept(kept, output, valid, first, start, KEPT: tl.constexpr, PLACES: tl.constexpr):
    """PLACES columns of `kept` (outputs, KEPT) from `first` on, for these outputs."""
    place = first + tl.arange(0, PLACES)
    inside = valid[:, None] & (place < KEPT)[None, :]
    return tl.load(kept + start + output.to(tl.int64)[:, None] * KEPT + place[None, :], inside, 0.0)


@triton.jit
def load_kept_tile(kept, start, tile, outputs, PLACES: tl.constexpr, TILE: tl.constexpr):
    """All columns of `kept` for the outputs of a tile (`tile_outputs`). Offsets inside of a tile are the same for every
    tile, so that only one address is computed for each."""
    R: tl.constexpr = TILE.outputs
    side: tl.constexpr = TILE.side
    lanes = tl.arange(0, R)
    place = tl.arange(0, PLACES)
    within = (lanes % side)[:, None] * TILE.kept + place[None, :]
    if TILE.gate != "":
        within += (lanes // side)[:, None] * (outputs // 2 * TILE.kept)
    if TILE.even:
        inside = (place < TILE.kept) & (tile * side < outputs // (R // side))
        inside = tl.broadcast_to(inside[None, :], [R, PLACES])
    else:
        _, valid = tile_outputs(tile, outputs, TILE)
        inside = valid[:, None] & (place < TILE.kept)[None, :]
    return tl.load(kept + start + (tile * side).to(tl.int64) * TILE.kept + within, inside, 0.0)


@triton.jit
def load_numbers(columns, first, KEPT: tl.constexpr, PLACES: tl.constexpr):
    """The numbers of these columns; -1 for none."""
    place = first + tl.arange(0, PLACES)
    return tl.load(columns + place, place < KEPT, -1)


@triton.jit
def gather(rows, inverse, column):
    """The activations of these columns of a row, rounded like the others; `inverse`: the inverse RMS of a row to be
    normed."""
    kind: tl.constexpr = rows.x.dtype.element_ty
    there = column >= 0
    numbers = tl.load(rows.x + column, there, 0.0).to(tl.float32)
    if rows.gain is not None:
        stream = (numbers + tl.load(rows.delta + column, there, 0.0).to(tl.float32)).to(kind).to(tl.float32)
        gain = tl.load(rows.gain + column, there, 0.0)
        numbers = weighted(stream, inverse, gain, rows.offset, rows.offset is not None, kind).to(kind).to(tl.float32)
    return numbers
