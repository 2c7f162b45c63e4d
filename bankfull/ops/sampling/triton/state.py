"""State of a row between the sampling kernels, and how they read the scores of a block."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.sampling.triton.numbers import distance_of
from bankfull.sample import draw
from bankfull.sample import table as columns

BINS = tl.constexpr(128)

# Sampling parameters of a row, by column of the sampling table.
TEMPERATURE, TOP_P, MIN_P = tl.constexpr(columns.TEMPERATURE), tl.constexpr(columns.TOP_P), tl.constexpr(columns.MIN_P)
TOP_K, GREEDY = tl.constexpr(columns.TOP_K), tl.constexpr(columns.GREEDY)
SEED, CHILD = tl.constexpr(columns.SEED), tl.constexpr(columns.CHILD)
NO_TOKEN = tl.constexpr(draw.NO_TOKEN)
ONE = tl.constexpr(2.0**draw.WEIGHT_BITS)

# State of a row, passed between kernels. Floats:
SHAPE = tl.constexpr(4)
AT_TOP, AT_TEMPERATURE, AT_SCALE, AT_FLOOR = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
# Integers: tokens with a key below CUT are kept, and the first ROOM of those with key CUT.
STATUS = tl.constexpr(8)
AT_STATE, AT_FIRST, AT_LAST, AT_FOUND = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
AT_RANK, AT_GOAL, AT_CUT, AT_ROOM = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)

# States. CUT_KNOWN has only the race left; SEARCHING has to find the cutoff first.
DONE, CUT_KNOWN, SEARCHING = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


class Lines(NamedTuple):
    """The rows of a step: their scores, their lines of the sampling table, and the tensors' strides."""

    scores: Tensor
    stride: int
    rows: Tensor
    length: Tensor
    reals: Tensor
    reals_stride: int
    wholes: Tensor
    wholes_stride: int


class Passes(NamedTuple):
    """What the passes leave to later ones: the state of each line, and numbers of each block."""

    shape: Tensor
    status: Tensor
    tops: Tensor
    bottoms: Tensor
    weights: Tensor
    counts: Tensor
    bins: Tensor
    found_keys: Tensor
    bounds: Tensor
    cut_bounds: Tensor


class LineBlocks(NamedTuple):
    """A line's blocks: their number, its next power of two, tokens of a block, and keys that are kept of a line."""

    vocab: int
    blocks: int
    width: int
    block: int = 0
    room: int = 0


@triton.jit
def block_scores(scores, stride, line, block, SIZE: tl.constexpr):
    ids = block * SIZE.block + tl.arange(0, SIZE.block)
    return tl.load(scores + line * stride + ids, mask=ids < SIZE.vocab, other=-float("inf")).to(tl.float32)


@triton.jit
def block_distances(own, shape, line, block, SIZE: tl.constexpr):
    raw = block_scores(own.scores, own.stride, line, block, SIZE)
    return distance_of(raw, tl.load(shape + line * SHAPE + AT_TOP), tl.load(shape + line * SHAPE + AT_TEMPERATURE))


@triton.jit
def bin_of(distance, scale):
    """Monotone, and identical in every kernel. The last bin is unbounded."""
    return tl.minimum(distance * scale, BINS - 1.0).to(tl.int32)
