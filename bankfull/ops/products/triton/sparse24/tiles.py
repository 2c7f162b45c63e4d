"""Some rows times a 2:4 sparse weight, in dense tensor core tiles whose zeros are put in between in registers.

Few rows are bound by reading the weight, and that costs 9/16 of the bytes of a dense one. The weight is the first
operand, as in `linear_tiles`. Many rows without a library for sparse tensor cores: a slice of the weight is expanded
into memory, and the library for dense products multiplies it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.products.triton.linear import sums_of
from bankfull.ops.products.triton.linear_rows import gated
from bankfull.ops.products.triton.linear_tiles import is_last_split, sum_of_splits
from bankfull.ops.products.triton.operands import ProductInput, ProductOutput, Tile
from bankfull.ops.products.triton.sparse24.words import SparseWords, expanded, per_word
from bankfull.ops.triton.launch import cdiv, multiprocessors, overlapped, power_of_two, start_next, wait_for_inputs


@triton.jit
def tile_of(pairs, positions, KIND: tl.constexpr, OUT: tl.constexpr, WORDS: tl.constexpr):
    """A tile [OUT, 4 WORDS] of the weight with its zeros, from pointers to its pairs and to their positions."""
    word = tl.load(pairs, eviction_policy="evict_first").to(tl.uint32, bitcast=True)
    return expanded(word, per_word(tl.load(positions), OUT, WORDS // 4), KIND, OUT, WORDS)


@triton.jit(do_not_specialize=["count"])
def sparse_tiles_kernel(
    rows, words, out, sums, count, share, GATE: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr
):
    """Programs process `share` pairs of a tile's outputs each; the last one to finish adds their sums in a fixed order.
    GATE: an activation f; the weight then has twice as many rows as there are outputs, and a result is f(first) times
    second, in one split. Outputs past the end are those of the last one, and are not stored."""
    start_next(OVERLAP)
    kind: tl.constexpr = out.y.dtype.element_ty
    ROWS: tl.constexpr = TILE.rows
    OUT: tl.constexpr = TILE.out
    WORDS: tl.constexpr = TILE.depth // 4
    SPLITS: tl.constexpr = TILE.splits
    outputs, quads = words.outputs, words.quads
    tile, split, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    within, row = tl.arange(0, OUT), tl.arange(0, ROWS)
    own, line = tile * OUT + within, block * ROWS + row
    exist, used = own < outputs, line < count
    first = tl.minimum(own, outputs - 1).to(tl.int64) * quads
    word, quad = split * share + tl.arange(0, WORDS), split * (share // 4) + tl.arange(0, WORDS // 4)
    column = 4 * split * share + tl.arange(0, 4 * WORDS)
    kept = words.pairs + 4 * first[:, None] + word[None, :]
    places = words.positions + first[:, None] + quad[None, :]
    second = tl.cast(outputs, tl.int64) * quads  # a plain number if there is one output
    inputs = rows.x + line[:, None].to(tl.int64) * rows.stride + column[None, :]
    wait_for_inputs(OVERLAP)
    total = tl.zeros((OUT, ROWS), tl.float32)
    up = tl.zeros((OUT, ROWS), tl.float32)
    for at in tl.range(0, share, WORDS, num_stages=TILE.stages):
        lines = tl.trans(tl.load(inputs + 4 * at, mask=used[:, None], other=0.0))
        total = tl.dot(tile_of(kept + at, places + at // 4, kind, OUT, WORDS), lines, total, input_precision="ieee")
        if GATE != "":
            other = tile_of(kept + 4 * second + at, places + second + at // 4, kind, OUT, WORDS)
            up = tl.dot(other, lines, up, input_precision="ieee")
    results = out.y + line[None, :].to(tl.int64) * outputs + own[:, None]
    known = exist[:, None] & used[None, :]
    if SPLITS == 1:
        if out.bias is not None:
            total += tl.load(out.bias + own, exist, 0.0).to(tl.float32)[:, None]
        if GATE != "":
            if out.bias is not None:
                up += tl.load(out.bias + outputs + own, exist, 0.0).to(tl.float32)[:, None]
            total = gated(total, up, GATE, kind)
        tl.store(results, total.to(kind), known)
    else:
        place = block * tl.num_programs(0) + tile
        parts = sums.partial + place * (SPLITS * OUT * ROWS) + within[:, None] * ROWS + row[None, :]
        if is_last_split(total, parts, sums.arrivals + place, split, OUT * ROWS, SPLITS):
            whole = sum_of_splits(parts, sums.arrivals + place, OUT * ROWS, SPLITS)
            if out.bias is not None:
                whole += tl.load(out.bias + own, exist, 0.0).to(tl.float32)[:, None]
            tl.store(results, whole.to(kind), known)


@dataclass(frozen=True, slots=True)
class TilePlan:
    """Outputs of a tile, words of each that an iteration reads, pipeline stages, and programs that share a tile."""

    outputs: int = 64
    words: int = 32
    stages: int = 4
    splits: int = 1


MOST_ROWS = 64
"""Rows of a tile."""


@cache
def plan_for(outputs: int, quads: int, device: torch.device, gate: bool) -> TilePlan:
    """Narrow layers are split among programs, until there are one or two for each multiprocessor. Not yet measured on a
    device: `benchmarks.gpu.sparse24 --sweep` does."""
    words = 32 if quads % 8 == 0 else 16
    splits, tiles = 1, cdiv(outputs, 64)
    while (
        not gate and splits < 8 and tiles * splits < multiprocessors(device) and 4 * quads % (2 * splits * words) == 0
    ):
        splits *= 2
    return TilePlan(words=words, splits=splits)


def tiles(x: Tensor, weight: SparseWords, bias: Tensor | None, gate: str = "", plan: TilePlan | None = None) -> Tensor:
    """x (rows, columns) with contiguous rows, times the weight."""
    rows, words = len(x), weight.for_gate(gate)
    plan = plan or plan_for(words.outputs, words.quads, x.device, bool(gate))
    height = min(MOST_ROWS, max(16, power_of_two(rows)))
    across, down = cdiv(words.outputs, plan.outputs), cdiv(rows, height)
    out = ProductOutput(bias, x.new_empty(rows, words.outputs))
    sums = None if plan.splits == 1 else sums_of(x.device, across * down, plan.splits * plan.outputs * height)
    tile = Tile(height, plan.outputs, 4 * plan.words, plan.stages, plan.splits)
    operands = (ProductInput.of(x), words, out, sums, rows, 4 * words.quads // plan.splits, gate, tile)
    sparse_tiles_kernel[(across, plan.splits, down)](*operands, num_warps=4, **overlapped(x))
    return out.y


@triton.jit
def expand_kernel(y, words, first, count, OUT: tl.constexpr, WORDS: tl.constexpr, OVERLAP: tl.constexpr):
    """Outputs `first` to `first + count` with their zeros."""
    start_next(OVERLAP)
    quads = words.quads
    here = tl.program_id(0) * OUT + tl.arange(0, OUT)
    start = (first + tl.minimum(here, count - 1)).to(tl.int64) * quads
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    quad = tl.program_id(1) * (WORDS // 4) + tl.arange(0, WORDS // 4)
    near = (word < 4 * quads)[None, :]
    found = tl.load(words.pairs + 4 * start[:, None] + word[None, :], near, 0).to(tl.uint32, bitcast=True)
    position = tl.load(words.positions + start[:, None] + quad[None, :], (quad < quads)[None, :], 0)
    values = expanded(found, per_word(position, OUT, WORDS // 4), y.dtype.element_ty, OUT, WORDS)
    column = 4 * WORDS * tl.program_id(1) + tl.arange(0, 4 * WORDS)
    wait_for_inputs(OVERLAP)
    at = here.to(tl.int64)[:, None] * (16 * quads) + column[None, :]
    tl.store(y + at, values, (here < count)[:, None] & (column < 16 * quads)[None, :])


SLICE = 1 << 25
"""Elements that are expanded at a time: it bounds the memory, and part of them is still cached at their product."""
EXPANDED_OUT, EXPANDED_WORDS = 16, 64


def expand(words: SparseWords, first: int, count: int, into: Tensor) -> Tensor:
    """Outputs `first` to `first + count` in the first rows of `into`."""
    grid = cdiv(count, EXPANDED_OUT), cdiv(4 * words.quads, EXPANDED_WORDS)
    operands = (into, words, first, count, EXPANDED_OUT, EXPANDED_WORDS)
    expand_kernel[grid](*operands, num_warps=4, **overlapped(into))
    return into[:count]


def expanded_product(x: Tensor, words: SparseWords, bias: Tensor | None) -> Tensor:
    """x (rows, columns), contiguous, times the weight."""
    outputs, columns = words.outputs, x.shape[1]
    step = min(outputs, max(128, SLICE // columns // 128 * 128))
    values = torch.empty(step, columns, dtype=x.dtype, device=x.device)
    y = torch.empty(len(x), outputs, dtype=x.dtype, device=x.device)
    for first in range(0, outputs, step):
        count = min(step, outputs - first)
        part = expand(words, first, count, values)
        torch.mm(x, part.t(), out=y[:, first : first + count])
    return y if bias is None else y.add_(bias)
