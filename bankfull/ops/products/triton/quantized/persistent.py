"""Quantized GEMV for one row with persistent programs and integer dot products.

The threads of a program share a whole row of words. Each keeps the activations of its words in registers, loaded (and
optionally joined with a residual branch and normed) once. The next tile's words load during the sums of the current
one; the first tile loads before the input is ready. Loaded values stay untouched until their tile is processed, because
even converting a scale would wait for the load.

Activations are 16-bit fixed point with a power of two per group (`fixed_point`), in two planes of bytes: dp4a
multiplies four of them with four codes and accumulates exactly, so a code takes about one instruction.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.pointwise.triton import activation
from bankfull.ops.products.body import Unnormed
from bankfull.ops.products.triton.operands import Kept, ProductInput, ProductOutput
from bankfull.ops.products.triton.outlier_rows import gather, load_kept_tile, load_numbers
from bankfull.ops.products.triton.quantized.fixed_point import load_activations, load_norm_weights
from bankfull.ops.products.triton.quantized.integer_tile import group_scales, load_tile, prepared, products
from bankfull.ops.products.triton.quantized.layout import INTERLEAVED_ROWS, Form, WordWeight
from bankfull.ops.products.triton.quantized.rows import neighbours
from bankfull.ops.products.triton.tile_outputs import RowTile, tile_outputs
from bankfull.ops.sampling.triton.sampling import best_of_parts
from bankfull.ops.triton.launch import (
    INTERPRETED,
    cdiv,
    multiprocessors,
    overlapped,
    power_of_two,
    start_next,
    wait_for_inputs,
)

LONGEST = 4096
"""Maximum words per row: eight for each of 512 threads."""
MOST_WARPS = 16
REGISTERS = 65536
"""Registers of a multiprocessor."""
LEAST_REGISTERS = 64
"""Registers per thread without which a program would spill."""
USUAL = 512
"""Words per row of an 8B model with 4-bit codes, for which the plans were measured."""
MANY_OUTPUTS = 65536
"""Outputs of a head, after which no large kernel follows."""


@triton.jit(do_not_specialize=["start"])
def persistent_kernel(rows, out, words, kept, start, FORM: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr):
    """With `out.indices` each program stores its highest output, and the first index that has it; a NaN counts as
    infinity. Outlier columns (`outlier_rows`) are at most as many as there are places of sums; such weights have one
    scale per row."""
    start_next(OVERLAP)
    R: tl.constexpr = TILE.outputs
    GATE: tl.constexpr = TILE.gate
    outputs = words.outputs
    tile = tl.program_id(0)
    # Weights are loaded before the activations are ready.
    codes, thirds, raw_scale, raw_minimum, raw_outer = load_tile(words, tile, FORM, TILE)
    row_scale = tl.zeros([R], tl.float32)
    if FORM.by_row:
        output, valid = tile_outputs(tile, outputs, TILE)
        row_scale = tl.load(words.scales + output, valid, 0.0)
    places: tl.constexpr = TILE.words // neighbours(FORM.length)
    if TILE.kept > 0:
        own_kept = load_kept_tile(kept.weights, start, tile, outputs, places, TILE)
        numbers = load_numbers(kept.columns, 0, TILE.kept, places)
    gains = ()
    if rows.gain is not None:
        gains = load_norm_weights(rows.gain, words, FORM, TILE)
    wait_for_inputs(OVERLAP)
    line, inverse = load_activations(rows, gains, words, FORM, TILE)
    line = prepared(line, FORM, TILE.words)
    if TILE.kept > 0:
        outliers = gather(rows, inverse, numbers)
    kind = rows.x.dtype.element_ty
    top = tl.full([R], -float("inf"), tl.float32)
    place = tl.zeros([R], tl.int32)
    tiles = tl.cdiv(outputs, R)
    while tile < tiles:
        own, exist = tile_outputs(tile, outputs, TILE)
        tile_now = tile
        tile += tl.num_programs(0)
        next_codes, next_thirds, next_scale, next_minimum, next_outer = load_tile(words, tile, FORM, TILE)
        scale, minimum = raw_scale, raw_minimum
        if not FORM.by_row:
            scale, minimum = group_scales(raw_scale, raw_minimum, raw_outer, FORM, TILE)
        sums = products(line, codes, thirds, scale, minimum, FORM, TILE)
        if TILE.kept > 0:
            result = tl.sum(sums * row_scale[:, None] + own_kept.to(tl.float32) * outliers[None, :], 1)
        elif FORM.by_row:
            result = tl.sum(sums, 1) * row_scale
        else:
            result = tl.sum(sums, 1)
        if FORM.by_row:
            ahead, valid = tile_outputs(tile, outputs, TILE)
            row_scale = tl.load(words.scales + ahead, valid, 0.0)
            if TILE.kept > 0:
                own_kept = load_kept_tile(kept.weights, start, tile, outputs, places, TILE)
        if out.bias is not None:
            result += tl.load(out.bias + own, exist, 0.0).to(tl.float32)
        if GATE != "":
            gate, passing = tl.split(tl.trans(tl.reshape(result.to(kind).to(tl.float32), [2, R // 2])))
            opened = activation(gate, GATE).to(kind).to(tl.float32)
            at = tile_now * (R // 2) + tl.arange(0, R // 2)
            tl.store(out.y + at, (opened * passing).to(kind), at < outputs // 2)
        elif out.indices is not None:
            score = result.to(kind).to(tl.float32)
            score = tl.where(score == score, score, float("inf"))
            better = exist & (score > top)
            top = tl.where(better, score, top)
            place = tl.where(better, own, place)
        else:
            tl.store(out.y + own, result.to(kind), exist)
        codes, thirds = next_codes, next_thirds
        raw_scale, raw_minimum, raw_outer = next_scale, next_minimum, next_outer
    if out.indices is not None:
        highest = tl.max(top, 0)
        tl.store(out.y + tl.program_id(0), highest)
        tl.store(out.indices + tl.program_id(0), tl.min(tl.where(top == highest, place, outputs), 0))


@dataclass(frozen=True, slots=True)
class GemvPlan:
    """Launch parameters of the persistent kernel."""

    outputs: int
    """Outputs per tile."""
    programs: int
    """Programs per multiprocessor."""
    groups: int = 1
    """Groups of threads in a program, each with whole rows of its own."""
    words: int = 4
    """Words of a row per thread."""
    registers: int | None = None
    """Maximum registers per thread."""


def supports(form: Form, columns: int, dtype: torch.dtype | None) -> bool:
    """Whether the kernel supports these weights: codes that are whole numbers, with 16-bit activations, which fixed
    point represents as well."""
    whole = form.bits == 4 or (form.bits != 6 and not form.floats)
    return whole and dtype in (torch.bfloat16, torch.float16) and columns <= _longest(form)


def _longest(form: Form) -> int:
    """Most columns whose activations fit into the registers of a program."""
    return LONGEST * min(form.per_word, 8)


def is_fastest(form: Form, columns: int, dtype: torch.dtype | None) -> bool:
    """Whether it is faster than non-persistent programs. On an H200, in a chain of the layers of an 8B model, it is,
    except for long rows of 8-bit codes. Shorter rows than in that model were not measured."""
    return supports(form, columns, dtype) and 2048 <= columns <= (8192 if form.bits == 8 else _longest(form))


def persistent_plan(weight: WordWeight, normed: bool = False) -> GemvPlan:
    """The fastest plan in such a chain. Occupancy matters most: as many warps as the registers allow, with a register
    limit for the compiler. Then few programs, because each reads and norms all activations, and tiles that divide the
    outputs evenly."""
    outputs, columns = weight.shape
    if weight.form.bits == 4 and weight.form.paired:
        return GemvPlan(8, 1) if columns > 8192 else GemvPlan(4, 4) if outputs <= 4096 else GemvPlan(8, 4)
    if weight.form.bits == 4 and weight.form.nested:  # two programs hide the two narrow loads per group best
        return GemvPlan(2, 2, words=16) if columns > 8192 else GemvPlan(16, 2)
    if weight.form.bits == 4 and weight.form.group < 128:  # scales of many groups need registers, too
        if columns > 8192:
            return GemvPlan(4, 1)
        return GemvPlan(16, 3) if outputs >= MANY_OUTPUTS else GemvPlan(8, 3) if outputs >= 16384 else GemvPlan(4, 3)
    if weight.form.bits < 4:  # a thread holds 64 codes and their activations, so 16 warps have registers
        if columns > 8192:
            return GemvPlan(4, 2, registers=128)
        if outputs >= 16384:
            return GemvPlan(8, 6)
        return GemvPlan(8, 4, groups=2) if normed else GemvPlan(4, 8)
    if weight.form.bits == 4:
        if columns > 8192:
            return GemvPlan(4, 2, words=8, registers=128)
        if outputs >= MANY_OUTPUTS:
            return GemvPlan(16, 3)
        if outputs >= 16384:
            return GemvPlan(8, 4, registers=128)
        return GemvPlan(8, 2, groups=2) if normed else GemvPlan(4, 6, words=8)
    return GemvPlan(4, 4) if outputs >= MANY_OUTPUTS else GemvPlan(8, 3) if outputs <= 4096 else GemvPlan(4, 3)


def one_row(
    x: Tensor | Unnormed,
    weight: WordWeight,
    bias: Tensor | None,
    gate: str = "",
    plan: GemvPlan | None = None,
    kept: Kept | None = None,
) -> Tensor:
    """x (1, columns), contiguous, times the weight; gated if `gate` is given."""
    return _launch(x, weight, bias, gate, False, plan, kept).y


def most_kept(columns: int) -> int:
    """Outlier columns that fit into a row of 8-bit codes: each thread may add one for each output."""
    return power_of_two(cdiv(columns, 4)) // 4


def best_of_row(x: Tensor | Unnormed, weight: WordWeight, bias: Tensor | None, plan: GemvPlan | None = None) -> Tensor:
    """Argmax over the outputs of `one_row`: only the best one of each program is stored."""
    parts = _launch(x, weight, bias, "", True, plan)
    assert parts.indices is not None
    return best_of_parts(parts.y, parts.indices, weight.shape[0])


def _divides(form: Form, outputs: int, tile: int, side: int) -> bool:
    """Whether tiles divide the outputs, and each half of a gated tile starts at a block of interleaved rows."""
    if outputs % tile or (form.paired and side < 2):
        return False
    return not form.paired or (outputs // (tile // side)) % INTERLEAVED_ROWS == 0


def _launch(
    x: Tensor | Unnormed,
    weight: WordWeight,
    bias: Tensor | None,
    gate: str,
    best: bool,
    plan: GemvPlan | None,
    kept: Kept | None = None,
) -> ProductOutput:
    """The outputs; or the highest output of each program, and its index."""
    outputs, form = weight.shape[0], weight.form
    normed = isinstance(x, Unnormed)
    plan = plan or persistent_plan(weight, normed)
    rows = ProductInput.of(x)
    device, dtype = rows.x.device, rows.x.dtype
    width = max(form.length, power_of_two(weight.row_words))
    warps = min(MOST_WARPS, plan.groups * max(1, width // (32 * plan.words)))
    # Short rows have smaller programs than the plans were measured with, so more of them fit.
    usual = USUAL * 8 // max(8, form.per_word)
    more = max(1, plan.groups * usual // (32 * plan.words) // warps)
    programs = min(cdiv(outputs, plan.outputs), plan.programs * more * multiprocessors(device))
    if best:
        y = torch.empty(1, programs, dtype=torch.float32, device=device)
        out = ProductOutput(bias, y, torch.empty(1, programs, dtype=torch.int32, device=device))
    else:
        out = ProductOutput(bias, torch.empty(1, outputs // 2 if gate else outputs, dtype=dtype, device=device))
    registers, share = plan.registers, REGISTERS // (32 * warps * plan.programs * more) // 8 * 8
    if kept is not None and registers is None and share >= LEAST_REGISTERS:
        registers = share  # outlier columns need some, but the plan's programs must still fit side by side
    bounded = {} if registers is None or INTERPRETED else {"maxnreg": registers}
    side = plan.outputs // 2 if gate else plan.outputs
    even = _divides(form, outputs, plan.outputs, side)
    tile = RowTile(plan.outputs, side, width, weight.words.groups, gate, even, 0 if kept is None else kept.width)
    persistent_kernel[(programs,)](
        rows,
        out,
        weight.words,
        kept,
        0,
        FORM=form,
        TILE=tile,
        num_warps=warps,
        **bounded,
        **overlapped(rows.x),
    )
    return out
