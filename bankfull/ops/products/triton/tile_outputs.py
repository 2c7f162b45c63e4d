"""Which outputs a tile of a GEMV has."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_outputs(tile, outputs, R: tl.constexpr, GATE: tl.constexpr):
    """The outputs of a tile, and which of them exist; a gated tile has gates in its first half, factors in its
    second."""
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
def outputs_per_side(R, GATE):
    """Adjacent outputs of a tile."""
    return R // 2 if GATE != "" else R
