"""Dense linear layers on a GPU: our GEMV kernel for a few rows, the library's GEMM or our tiles for more.

The kernel is chosen from the row count and the shape alone (`heuristic`), or from the table that `bankfull tune`
measured. Activations keep their dtype, accumulators are float32; float32 products are IEEE.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bankfull.ops.norm.body import add_rms_norm
from bankfull.ops.pointwise.body import activate_mul
from bankfull.ops.products.body import FEW_ROWS, PLAIN, Epilogue, Unnormed, linear
from bankfull.ops.products.triton.linear_rows import persistent_gated_kernel, rows_kernel
from bankfull.ops.products.triton.linear_tiles import gated_tiles_kernel, split_tiles_kernel, tiles_kernel
from bankfull.ops.products.triton.operands import DenseMatrix, ProductInput, ProductOutput, Tile
from bankfull.ops.products.triton.table import lookup
from bankfull.ops.sampling.triton.sampling import best
from bankfull.ops.triton.launch import multiprocessors, overlapped, power_of_two, stream_of
from bankfull.weights.qtensor import QTensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDEST = 16384
"""Maximum columns that a program holds at once."""
LARGE_WEIGHT, MANY_OUTPUTS = 1 << 24, 65536
"""Minimum elements of a weight, and outputs of a head, for which our tiles may be faster; smaller ones were not
measured."""


def _accepts(
    *, dtype: torch.dtype | None = None, weight: QTensor | None = None, normed: bool = False, **facts: Any
) -> bool:
    if dtype not in DTYPES or not isinstance(weight, QTensor) or not weight.is_dense:
        return False
    data = weight.parts["data"]
    fits = data.dtype is dtype and data.dim() == 2 and data.stride(1) == 1
    return fits and (not normed or weight.shape[1] <= WIDEST)


def fits_rows_kernel(rows: int, columns: int) -> bool:
    """Whether `rows_kernel` handles these rows: so few that CUDA cores keep up with memory. It is slower than the
    library beyond that, even where launches dominate: a step of a 135M model takes 1.24 ms instead of 1.07 ms for 5
    rows, and 2.11 ms instead of 1.06 ms for 13 (H200)."""
    return 0 < rows <= FEW_ROWS and columns <= WIDEST


@dataclass(frozen=True, slots=True)
class Shape:
    """Launch shape of `rows_kernel`: outputs per program, and its warps."""

    out: int
    warps: int


@cache
def rows_shape(rows: int, outputs: int, columns: int, gated: bool, wide: bool) -> Shape:
    """About 16 KiB of weights per program: enough loads in flight, and enough programs to finish at the same time.
    Measured on an H200 over the linears of an 8B model: 94 to 96% of the read bandwidth. Short rows finish sooner with
    fewer warps that synchronize, if there are enough programs: measured over 0.6B and 135M, for one row."""
    width = power_of_two(columns)
    if not wide and gated and width <= 1024:
        return Shape(4, 2)
    if not wide and not gated and columns == 1024 and outputs >= 4096 and rows == 1:
        return Shape(8, 1)
    if not wide and not gated and width == 4096 and outputs <= 1024:
        return Shape(8, 8)
    held = 8192 // (2 if wide else 1) // (2 if gated else 1)
    return Shape(max(1, min(held // width, 16)), 16 if width > 8192 else 8 if width > 4096 else 4)


PERSISTENT_OUT, PERSISTENT_PROGRAMS = 2, 2
"""Outputs of a tile, and programs per multiprocessor, of the persistent kernel."""


def is_persistent(rows: int, outputs: int, width: int, bias: Tensor | None, kind: str | None) -> bool:
    """Whether the persistent kernel runs: one row of a gated layer with several tiles per program. On an H200 it is 1%
    faster than one tile per program; for ungated layers it is not."""
    return rows == 1 and kind is not None and bias is None and outputs >= 8192 and 2048 <= width <= 4096


def few_rows(x: Tensor | Unnormed, weight: Tensor, bias: Tensor | None, kind: str | None) -> Tensor:
    rows, outputs = ProductInput.of(x), weight.shape[0] if kind is None else weight.shape[0] // 2
    count, columns = rows.x.shape
    out, width = ProductOutput(bias, rows.x.new_empty(count, outputs)), power_of_two(columns)
    if is_persistent(count, outputs, width, bias, kind):
        tile = Tile(1, PERSISTENT_OUT, width)
        kernel, warps = persistent_gated_kernel, 8
        programs = min(PERSISTENT_PROGRAMS * multiprocessors(rows.x.device), -(-outputs // PERSISTENT_OUT))
    else:
        shape = rows_shape(count, outputs, columns, kind is not None, weight.element_size() > 2)
        tile = Tile(count, shape.out, width)
        kernel, warps = rows_kernel, shape.warps
        programs = -(-outputs // shape.out)
    operands = (rows, DenseMatrix(weight, weight.stride(0)), out, outputs)
    kernel[(programs,)](*operands, columns, kind, tile, num_warps=warps, **overlapped(rows.x))
    return out.y


@dataclass(frozen=True, slots=True)
class Plan:
    """A way to compute a GEMM. `rows` is the maximum in total, or per program; `stages` the maximum pipeline depth of
    its operands."""

    name: str
    rows: int
    out: int = 0
    depth: int = 0
    stages: int = 0
    warps: int = 0
    splits: int = 0
    """Split-K: programs that share a tile's columns, with the weight as first operand (`split_tiles_kernel`)."""
    early: int = 0
    """Cache lines (128 bytes) of each output that a split-K program prefetches before its input is ready."""


MOST_TILE_ROWS = 32
"""Maximum rows of tiles whose first operand is the weight."""


def _split(out: int, splits: int, stages: int, early: int) -> Plan:
    name = f"split-{out}x{splits}, {stages} stages, {early} early"
    return Plan(name, MOST_TILE_ROWS, out, 128, stages, 4, splits, early)


ROWS, LIBRARY = Plan("rows", FEW_ROWS), Plan("library", 1 << 31)
WHOLE, HALVED, MANY_TILES = _split(64, 1, 6, 8), _split(64, 2, 6, 0), _split(64, 1, 4, 0)
SPLIT = (WHOLE, HALVED, MANY_TILES)
TILES = tuple(
    Plan(f"tiles-{rows}x{out}x{depth}", rows, out, depth, stages, warps)
    for rows in (16, 32, 64)
    for out, depth, stages, warps in ((32, 256, 4, 4), (64, 128, 5, 4), (128, 64, 5, 4))
)
CANDIDATES = (ROWS, LIBRARY, *TILES, *SPLIT)
_BY_NAME = {plan.name: plan for plan in CANDIDATES}


HOPPER_MEMORY = 227 << 10


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory available to a program."""
    if device.type != "cuda":
        return HOPPER_MEMORY  # interpreted, or compiled without a GPU
    facts = torch.cuda.get_device_properties(device)
    return int(getattr(facts, "shared_memory_per_block_optin", facts.shared_memory_per_block))


def stages_of(plan: Plan, dtype: torch.dtype, device: torch.device) -> int:
    """Pipeline stages of the plan's tiles that fit into shared memory; 0 if not even one does."""
    stage = (plan.rows + plan.out) * plan.depth * dtype.itemsize
    return min(plan.stages, shared_memory(device) // stage)


def can_run(plan: Plan, rows: int, outer: int, inner: int, dtype: torch.dtype, device: torch.device) -> bool:
    if plan is ROWS:
        return fits_rows_kernel(rows, inner)
    if plan.splits:
        fits = 0 < rows <= plan.rows and outer % plan.out == 0 and inner % (plan.splits * plan.depth) == 0
        return fits and dtype.itemsize == 2 and stages_of(plan, dtype, device) == plan.stages
    return plan is LIBRARY or stages_of(plan, dtype, device) > 0


def heuristic(rows: int, outer: int, inner: int, dtype: torch.dtype, device: torch.device) -> Plan:
    """The plan without a table. For 32 rows on an H200, our tiles are faster for heads and for all layers of 8B
    together, if there are no more tiles than multiprocessors: a step takes 4.74 ms instead of 5.04 with the library.
    Beyond that the library was as fast as our best tiles, or faster, for nearly all shapes; 5 to 16 rows were not
    measured."""
    if fits_rows_kernel(rows, inner):
        return ROWS
    if not 16 < rows <= MOST_TILE_ROWS or outer * inner < LARGE_WEIGHT:
        return LIBRARY
    plan = LIBRARY
    if outer >= MANY_OUTPUTS:
        plan = MANY_TILES
    elif 4096 <= outer <= 8192 and inner <= 8192:
        plan = WHOLE
    elif outer == 4096:
        plan = HALVED
    return plan if can_run(plan, rows, outer, inner, dtype, device) else LIBRARY


@cache
def plan_for(rows: int, outer: int, inner: int, dtype: torch.dtype, device: torch.device) -> Plan:
    tuned = _BY_NAME.get(lookup(rows, outer, inner, dtype, device) or "")
    if tuned is None or not can_run(tuned, rows, outer, inner, dtype, device):
        return heuristic(rows, outer, inner, dtype, device)
    return tuned


def tile_rows(rows: int) -> int:
    return 16 if rows <= 16 else MOST_TILE_ROWS


class SplitSums(NamedTuple):
    """Partial sums and arrival counters of split-K tiles, of one stream."""

    partial: Tensor
    arrivals: Tensor


_sums: dict[tuple[torch.device, int, int, int], SplitSums] = {}


def sums_of(device: torch.device, tiles: int, numbers: int) -> SplitSums:
    key = device, stream_of(device), tiles, numbers
    if key in _sums:
        return _sums[key]
    partial = torch.empty(tiles * numbers, dtype=torch.float32, device=device)
    sums = SplitSums(partial, torch.zeros(tiles, dtype=torch.int32, device=device))
    # During capture nothing runs, so the zeros exist only once the graph is replayed: do not share this allocation.
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        _sums[key] = sums
    return sums


def run_plan(plan: Plan, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if plan is LIBRARY:
        return torch.nn.functional.linear(x, weight, bias)
    if not can_run(plan, len(x), weight.shape[0], weight.shape[1], x.dtype, x.device):
        raise ValueError(f"{plan.name} cannot multiply {len(x)} rows of {x.shape[1]} {x.dtype} columns on {x.device}")
    if plan is ROWS:
        return few_rows(x, weight, bias, None)
    given, matrix = ProductInput.of(x), DenseMatrix(weight, weight.stride(0))
    rows, (outputs, columns) = len(x), weight.shape
    out = ProductOutput(bias, x.new_empty(rows, outputs))
    settings = {"num_warps": plan.warps, **overlapped(x)}
    if plan.splits:
        tile = Tile(tile_rows(rows), plan.out, plan.depth, plan.stages, plan.splits)
        tiles, share = outputs // plan.out, columns // plan.splits
        sums = sums_of(x.device, tiles, plan.splits * plan.out * tile.rows)
        operands = (given, matrix, out, sums, rows, outputs, share)
        split_tiles_kernel[(tiles, plan.splits)](*operands, plan.early, tile, **settings)
        return out.y
    tile = Tile(plan.rows, plan.out, plan.depth, stages_of(plan, x.dtype, x.device))
    even = columns % plan.depth == 0 and outputs % plan.out == 0
    grid = (-(-outputs // plan.out), -(-rows // plan.rows))
    tiles_kernel[grid](given, matrix, out, rows, outputs, columns, even, tile, **settings)
    return out.y


GATED_OUT, GATED_DEPTH, GATED_STAGES = 64, 128, 4


@cache
def fits_gated_tiles(
    rows: int, outputs: int, columns: int, bias: bool, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether one kernel computes GEMM and gate. On an H200 a step of 8B takes 2.6 to 4.3% less than with the library
    and a separate activation, for 8 to 32 rows; one of 3B 4%. Smaller layers and more rows were not measured."""
    stage = (2 * GATED_OUT + MOST_TILE_ROWS) * GATED_DEPTH * dtype.itemsize
    return (
        FEW_ROWS < rows <= MOST_TILE_ROWS
        and outputs >= 8192
        and 2048 <= columns <= WIDEST
        and not bias
        and outputs % GATED_OUT == 0
        and columns % GATED_DEPTH == 0
        and dtype.itemsize == 2
        and stage * GATED_STAGES <= shared_memory(device)
    )


def gated_tiles(x: Tensor, weight: Tensor, kind: str) -> Tensor:
    outputs, columns = weight.shape[0] // 2, weight.shape[1]
    out = ProductOutput(None, x.new_empty(len(x), outputs))
    tile = Tile(tile_rows(len(x)), GATED_OUT, GATED_DEPTH, GATED_STAGES)
    operands = (ProductInput.of(x), DenseMatrix(weight, weight.stride(0)), out, len(x), outputs, columns, kind, tile)
    gated_tiles_kernel[(outputs // GATED_OUT,)](*operands, num_warps=4, **overlapped(x))
    return out.y


def read(x: Unnormed) -> Tensor:
    """The rows where no kernel fuses the norm. Layers check the row count first, so they do not get here."""
    joined, normed = add_rms_norm.body(x.x, x.delta, x.weight, x.eps, x.offset)
    x.joined.copy_(joined)
    return normed


def finished(y: Tensor, epilogue: Epilogue) -> Tensor:
    """What follows a product and its bias, where no kernel fuses it."""
    if epilogue.gate:
        y = activate_mul.providers["triton"].run(*y.chunk(2, -1), epilogue.gate)
    return best(y) if epilogue.best else y


@linear.provider("triton", on="cuda", accepts=_accepts, fuses=("gated", "normed", "normed_gated", "best"))
def run_linear(x: Tensor | Unnormed, weight: QTensor, epilogue: Epilogue = PLAIN) -> Tensor:
    data, (bias, gate, chooses) = weight.parts["data"], epilogue
    if isinstance(x, Unnormed):
        if fits_rows_kernel(*x.x.shape):
            return few_rows(x, data, bias, gate or None)
        x = read(x)
    if chooses and x.dim() != 2:
        return run_linear(x.reshape(-1, x.shape[-1]), weight, epilogue).reshape(x.shape[:-1])
    if x.dim() != 2 or not len(x):
        return finished(torch.nn.functional.linear(x, data, bias), epilogue)
    if gate and fits_rows_kernel(*x.shape):
        return few_rows(x, data, bias, gate)
    if gate and fits_gated_tiles(len(x), data.shape[0] // 2, data.shape[1], bias is not None, x.dtype, x.device):
        return gated_tiles(x, data, gate)
    return finished(run_plan(plan_for(len(x), *data.shape, x.dtype, x.device), x, data, bias), epilogue)
