"""Which outputs a tile of a GEMV has."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class RowTile(NamedTuple):
    """Compile-time shape of a tile of a GEMV: adjacent outputs, each with all of its words."""

    outputs: int
    side: int
    """Adjacent ones: half of them, if there is a gate."""
    words: int
    """A power of two of at least a row's words."""
    groups: int
    """Groups of a row."""
    gate: str
    """The name of an activation, or nothing; a gated tile has gates in its first half, factors in its second."""
    even: bool
    """Whether tiles divide the outputs, and each side of one starts at a block of interleaved rows."""
    kept: int
    """Outlier columns."""


@triton.jit
def tile_outputs(tile, outputs, TILE: tl.constexpr):
    """The outputs of a tile, and which of them exist."""
    lanes = tl.arange(0, TILE.outputs)
    if TILE.gate != "":
        pair = tile * TILE.side + lanes % TILE.side
        valid = pair < outputs // 2
        output = pair + lanes // TILE.side * (outputs // 2)
    else:
        output = tile * TILE.outputs + lanes
        valid = output < outputs
    return output, valid
