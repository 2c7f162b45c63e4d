"""Dense linear layers on a GPU: our kernel for a few rows, the library's matrix product or tiles of ours for more.

Which of them runs follows from the number of rows and the shape alone (`heuristic`), or from the table that
`bankfull tune` measured. Activations are untouched, sums are float32; float32 products are IEEE.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from bankfull.ops.reference.activation import activate_mul
from bankfull.ops.reference.linear import (
    FEW_ROWS,
    Unnormed,
    best_output,
    gated_linear,
    linear,
    normed_gated_linear,
    normed_linear,
)
from bankfull.ops.reference.norm import add_rms_norm
from bankfull.ops.triton.launch import overlapped, power_of_two, processors
from bankfull.ops.triton.linear_rows import long_gated_kernel, rows_kernel
from bankfull.ops.triton.linear_tiles import gated_tiles_kernel, split_tiles_kernel, tiles_kernel
from bankfull.ops.triton.table import lookup
from bankfull.weights.qtensor import QTensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDEST = 16384
"""Columns that a program holds at once."""
LARGE_WEIGHT, MANY_OUTPUTS = 1 << 24, 65536
"""Numbers of a weight that our tiles may be faster for, and outputs of a head; smaller ones were not measured."""


def _accepts(*, dtype: torch.dtype | None = None, weight: QTensor | None = None, **facts: Any) -> bool:
    if dtype not in DTYPES or not isinstance(weight, QTensor) or not weight.is_dense:
        return False
    data = weight.parts["data"]
    return data.dtype is dtype and data.dim() == 2 and data.stride(1) == 1


def _accepts_normed(*, weight: QTensor | None = None, **facts: Any) -> bool:
    return _accepts(weight=weight, **facts) and weight is not None and weight.shape[1] <= WIDEST


def takes_few(rows: int, columns: int) -> bool:
    """Does the kernel for a few rows take them? So few that the plain units keep up with memory."""
    return 0 < rows <= FEW_ROWS and columns <= WIDEST


@dataclass(frozen=True, slots=True)
class Shape:
    """How `rows_kernel` is cut: outputs per program, and its warps."""

    out: int
    warps: int


@cache
def shape_of(rows: int, outputs: int, columns: int, gated: bool, wide: bool) -> Shape:
    """About 16 KiB of weights per program: enough requests in flight, and enough programs that they end together.
    Measured on an H200 over the linears of an 8B model: 94 to 96% of the read bandwidth. Short rows end the sooner the
    fewer warps wait for each other, as long as there are programs enough: measured over 0.6B and 135M, for one row."""
    width = power_of_two(columns)
    if not wide and gated and width <= 1024:
        return Shape(4, 2)
    if not wide and not gated and columns == 1024 and outputs >= 4096 and rows == 1:
        return Shape(8, 1)
    if not wide and not gated and width == 4096 and outputs <= 1024:
        return Shape(8, 8)
    held = 8192 // (2 if wide else 1) // (2 if gated else 1)
    return Shape(max(1, min(held // width, 16)), 16 if width > 8192 else 8 if width > 4096 else 4)


LONG_OUT, LONG_PROGRAMS = 2, 2
"""Outputs of a tile, and programs for each multiprocessor, where programs take tiles in turns."""


def takes_turns(rows: int, outputs: int, width: int, bias: Tensor | None, kind: str | None) -> bool:
    """Is it one row of a gated layer, with several tiles for each program? Then 1% faster on an H200 than programs of
    one tile; layers that are not gated were not."""
    return rows == 1 and kind is not None and bias is None and outputs >= 8192 and 2048 <= width <= 4096


def few_rows(x: Tensor | Unnormed, weight: Tensor, bias: Tensor | None, kind: str | None) -> Tensor:
    before = x if isinstance(x, Unnormed) else None
    rows = x.x if isinstance(x, Unnormed) else x
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    count, columns = rows.shape
    outputs = weight.shape[0] if kind is None else weight.shape[0] // 2
    y = rows.new_empty(count, outputs)
    delta = rows if before is None else before.delta
    if delta.stride(-1) != 1:
        delta = delta.contiguous()
    width = power_of_two(columns)
    joined, norm, eps, offset = (
        (y, y, 0.0, 0.0) if before is None else (before.joined, before.weight, before.eps, before.offset)
    )
    if takes_turns(count, outputs, width, bias, kind):
        programs = min(LONG_PROGRAMS * processors(rows.device), -(-outputs // LONG_OUT))
        long_gated_kernel[(programs,)](
            rows,
            delta,
            joined,
            norm,
            eps,
            offset,
            weight,
            weight.stride(0),
            y,
            outputs,
            columns,
            width,
            LONG_OUT,
            before is not None,
            offset != 0.0,
            kind,
            num_warps=8,
            **overlapped(rows),
        )
        return y
    shape = shape_of(count, outputs, columns, kind is not None, weight.element_size() > 2)
    rows_kernel[(-(-outputs // shape.out),)](
        rows,
        rows.stride(0),
        delta,
        delta.stride(0),
        joined,
        norm,
        eps,
        offset,
        weight,
        weight.stride(0),
        weight if bias is None else bias,
        y,
        outputs,
        count,
        columns,
        width,
        shape.out,
        before is not None,
        offset != 0.0,
        bias is not None,
        kind,
        num_warps=shape.warps,
        **overlapped(rows),
    )
    return y


@dataclass(frozen=True, slots=True)
class Plan:
    """A way to compute a product. `rows` is the most that it takes, or that a program does at once; `stages` the most
    parts of its operands that are on their way at a time."""

    name: str
    rows: int
    out: int = 0
    depth: int = 0
    stages: int = 0
    warps: int = 0
    splits: int = 0
    """Programs that share a tile's columns, where the weight is the first operand (`split_tiles_kernel`)."""
    early: int = 0
    """Lines of 128 bytes of each output that such a program asks for before its input is there."""


MOST_TILE_ROWS = 32
"""Of the tiles whose first operand is the weight."""


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
    """Bytes that a program may have on its multiprocessor."""
    if device.type != "cuda":
        return HOPPER_MEMORY  # interpreted, or compiled without a device
    facts = torch.cuda.get_device_properties(device)
    return int(getattr(facts, "shared_memory_per_block_optin", facts.shared_memory_per_block))


def stages_of(plan: Plan, dtype: torch.dtype, device: torch.device) -> int:
    """How many stages of a plan's tiles there is room for; 0: not even for one."""
    stage = (plan.rows + plan.out) * plan.depth * dtype.itemsize
    return min(plan.stages, shared_memory(device) // stage)


def can_run(plan: Plan, rows: int, outer: int, inner: int, dtype: torch.dtype, device: torch.device) -> bool:
    if plan is ROWS:
        return takes_few(rows, inner)
    if plan.splits:
        fits = 0 < rows <= plan.rows and outer % plan.out == 0 and inner % (plan.splits * plan.depth) == 0
        return fits and dtype.itemsize == 2 and stages_of(plan, dtype, device) == plan.stages
    return plan is LIBRARY or stages_of(plan, dtype, device) > 0


def heuristic(rows: int, outer: int, inner: int, dtype: torch.dtype, device: torch.device) -> Plan:
    """Without a table. For 32 rows our tiles are faster on an H200 for heads and for the layers of 8B, all of them
    together, as long as there are no more tiles than multiprocessors: a step takes 4.74 ms where it took 5.04 with the
    library. Beyond that the library was as fast as the best of our tiles, or faster, for nearly all shapes; 5 to 16
    rows were not measured."""
    if takes_few(rows, inner):
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
    found = _BY_NAME.get(lookup(rows, outer, inner, dtype, device) or "")
    if found is None or not can_run(found, rows, outer, inner, dtype, device):
        return heuristic(rows, outer, inner, dtype, device)
    return found


def tile_rows(rows: int) -> int:
    return 16 if rows <= 16 else MOST_TILE_ROWS


class Sums:
    """Sums of the programs that share a tile, and how many have left theirs. One stream at a time may use it."""

    def __init__(self, device: torch.device, tiles: int, numbers: int) -> None:
        self.partial = torch.empty(tiles * numbers, dtype=torch.float32, device=device)
        self.arrivals = torch.zeros(tiles, dtype=torch.int32, device=device)


_sums: dict[tuple[torch.device, int, int], Sums] = {}


def sums_of(device: torch.device, tiles: int, numbers: int) -> Sums:
    key = device, tiles, numbers
    if key in _sums:
        return _sums[key]
    made = Sums(device, tiles, numbers)
    # While a step is captured nothing runs: zeros appear when it is replayed, so only that step may rely on them.
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        _sums[key] = made
    return made


def run_plan(plan: Plan, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if plan is LIBRARY:
        return torch.nn.functional.linear(x, weight, bias)
    if not can_run(plan, len(x), weight.shape[0], weight.shape[1], x.dtype, x.device):
        raise ValueError(f"{plan.name} cannot multiply {len(x)} rows of {x.shape[1]} {x.dtype} numbers on {x.device}")
    if plan is ROWS:
        return few_rows(x, weight, bias, None)
    if x.stride(-1) != 1:
        x = x.contiguous()
    (rows, columns), outputs = x.shape, weight.shape[0]
    y = x.new_empty(rows, outputs)
    if plan.splits:
        tiles, height = outputs // plan.out, tile_rows(rows)
        own = sums_of(x.device, tiles, plan.splits * plan.out * height)
        split_tiles_kernel[(tiles, plan.splits)](
            x,
            x.stride(0),
            weight,
            weight.stride(0),
            weight if bias is None else bias,
            y,
            own.partial,
            own.arrivals,
            rows,
            outputs,
            columns // plan.splits,
            height,
            plan.out,
            plan.depth,
            plan.stages,
            plan.splits,
            plan.early,
            bias is not None,
            num_warps=plan.warps,
            **overlapped(x),
        )
        return y
    even = columns % plan.depth == 0 and outputs % plan.out == 0
    tiles_kernel[(-(-outputs // plan.out), -(-rows // plan.rows))](
        x,
        x.stride(0),
        weight,
        weight.stride(0),
        weight if bias is None else bias,
        y,
        rows,
        outputs,
        columns,
        plan.rows,
        plan.out,
        plan.depth,
        stages_of(plan, x.dtype, x.device),
        even,
        bias is not None,
        num_warps=plan.warps,
        **overlapped(x),
    )
    return y


GATED_OUT, GATED_DEPTH, GATED_STAGES = 64, 128, 4


@cache
def gates_in_tiles(rows: int, outputs: int, columns: int, bias: bool, dtype: torch.dtype, device: torch.device) -> bool:
    """Does one kernel multiply and gate these rows? On an H200 a step of 8B takes 2.6 to 4.3% less than with a library
    call and an activation behind it, for 8 to 32 rows, one of 3B 4%. Smaller layers and more rows were not measured."""
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
    if x.stride(-1) != 1:
        x = x.contiguous()
    (rows, columns), outputs = x.shape, weight.shape[0] // 2
    y = x.new_empty(rows, outputs)
    gated_tiles_kernel[(outputs // GATED_OUT,)](
        x,
        x.stride(0),
        weight,
        weight.stride(0),
        y,
        rows,
        outputs,
        columns,
        tile_rows(rows),
        GATED_OUT,
        GATED_DEPTH,
        GATED_STAGES,
        kind,
        num_warps=4,
        **overlapped(x),
    )
    return y


@linear.provider("triton", on="cuda", accepts=_accepts)
def run_linear(x: Tensor, weight: QTensor, bias: Tensor | None = None) -> Tensor:
    data = weight.parts["data"]
    if x.dim() != 2 or not len(x):
        return torch.nn.functional.linear(x, data, bias)
    return run_plan(plan_for(len(x), *data.shape, x.dtype, x.device), x, data, bias)


@gated_linear.provider("triton", on="cuda", accepts=_accepts)
def run_gated_linear(x: Tensor, weight: QTensor, bias: Tensor | None, kind: str) -> Tensor:
    data = weight.parts["data"]
    if takes_few(*x.shape):
        return few_rows(x, data, bias, kind)
    if gates_in_tiles(len(x), data.shape[0] // 2, data.shape[1], bias is not None, x.dtype, x.device):
        return gated_tiles(x, data, kind)
    gate, up = run_linear(x, weight, bias).chunk(2, -1)
    return activate_mul.providers["triton"].run(gate, up, kind)


@normed_linear.provider("triton", on="cuda", accepts=_accepts_normed)
def run_normed_linear(x: Unnormed, weight: QTensor, bias: Tensor | None = None) -> Tensor:
    if takes_few(*x.x.shape):
        return few_rows(x, weight.parts["data"], bias, None)
    return run_linear(read(x), weight, bias)


@normed_gated_linear.provider("triton", on="cuda", accepts=_accepts_normed)
def run_normed_gated_linear(x: Unnormed, weight: QTensor, bias: Tensor | None, kind: str) -> Tensor:
    if takes_few(*x.x.shape):
        return few_rows(x, weight.parts["data"], bias, kind)
    return run_gated_linear(read(x), weight, bias, kind)


def read(x: Unnormed) -> Tensor:
    """Where no kernel norms its own input. Layers do not come here: they ask for the row count first."""
    joined, normed = add_rms_norm.body(x.x, x.delta, x.weight, x.eps, x.offset)
    x.joined.copy_(joined)
    return normed


@best_output.provider("triton", on="cuda", accepts=_accepts)
def run_best_output(x: Tensor, weight: QTensor, bias: Tensor | None = None) -> Tensor:
    from bankfull.ops.triton.sampling import best

    scores = run_linear(x.reshape(-1, x.shape[-1]), weight, bias)
    return best(scores).reshape(x.shape[:-1])
