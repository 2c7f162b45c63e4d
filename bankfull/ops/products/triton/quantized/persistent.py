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
from bankfull.ops.products.triton.outlier_rows import gather, load_kept_tile, load_numbers
from bankfull.ops.products.triton.quantized.fixed_point import load_activations, load_norm_weights
from bankfull.ops.products.triton.quantized.integer_tile import group_scales, load_tile, prepared, products
from bankfull.ops.products.triton.quantized.layout import INTERLEAVED_ROWS, Form, WordWeight
from bankfull.ops.products.triton.quantized.rows import neighbours
from bankfull.ops.products.triton.tile_outputs import tile_outputs
from bankfull.ops.sampling.triton.sampling import best_of_parts
from bankfull.ops.triton.launch import (
    INTERPRETED,
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
def persistent_kernel(
    x,
    delta,
    joined,
    norm,
    eps,
    offset,
    bias,
    y,
    indices,
    words,
    high,
    scales,
    minima,
    outer_scales,
    kept_columns,
    kept,
    start,
    outputs,
    columns,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    FLOATS: tl.constexpr,
    NESTED: tl.constexpr,
    MINIMA: tl.constexpr,
    BY_ROW: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATE: tl.constexpr,
    BEST: tl.constexpr,
    NORM: tl.constexpr,
    SHIFTED: tl.constexpr,
    KEPT: tl.constexpr,
    GROUPS: tl.constexpr,
    EVEN: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
    L: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """BEST: each program stores its highest output to `y`, and the first index that has it to `indices`; a NaN counts
    as infinity. KEPT: outlier columns (`outlier_rows`), at most as many as there are places of sums; such weights have
    one scale per row."""
    start_next(OVERLAP)
    tile = tl.program_id(0)
    # Weights are loaded before the activations are ready.
    codes, thirds, raw_scale, raw_minimum, raw_outer = load_tile(
        words,
        high,
        scales,
        minima,
        outer_scales,
        tile,
        outputs,
        BITS,
        NESTED,
        MINIMA,
        BY_ROW,
        GROUP,
        GROUPS,
        GATE,
        EVEN,
        R,
        W,
        L,
    )
    row_scale = tl.zeros([R], tl.float32)
    if BY_ROW:
        output, valid = tile_outputs(tile, outputs, R, GATE)
        row_scale = tl.load(scales + output, valid, 0.0)
    places: tl.constexpr = W // neighbours(L)
    if KEPT > 0:
        own_kept = load_kept_tile(kept, start, tile, outputs, KEPT, places, GATE, EVEN, R)
        numbers = load_numbers(kept_columns, 0, KEPT, places)
    gains = ()
    if NORM:
        gains = load_norm_weights(norm, GROUPS, columns, GROUP, W, L, PADDED)
    wait_for_inputs(OVERLAP)
    line, inverse = load_activations(
        x, delta, joined, gains, eps, offset, GROUPS, columns, GROUP, W, L, PADDED, NORM, SHIFTED
    )
    upper, lower, factors, whole = prepared(line, BITS, FLOATS, W, L)
    if KEPT > 0:
        outliers = gather(x, delta, norm, inverse, offset, numbers, NORM, SHIFTED)
    kind = x.dtype.element_ty
    top = tl.full([R], -float("inf"), tl.float32)
    place = tl.zeros([R], tl.int32)
    tiles = tl.cdiv(outputs, R)
    while tile < tiles:
        own, exist = tile_outputs(tile, outputs, R, GATE)
        tile_now = tile
        tile += tl.num_programs(0)
        next_codes, next_thirds, next_scale, next_minimum, next_outer = load_tile(
            words,
            high,
            scales,
            minima,
            outer_scales,
            tile,
            outputs,
            BITS,
            NESTED,
            MINIMA,
            BY_ROW,
            GROUP,
            GROUPS,
            GATE,
            EVEN,
            R,
            W,
            L,
        )
        scale, minimum = raw_scale, raw_minimum
        if not BY_ROW:
            scale, minimum = group_scales(raw_scale, raw_minimum, raw_outer, NESTED, MINIMA, EVEN, GATE, R, W // L)
        sums = products(
            upper,
            lower,
            factors,
            whole,
            codes,
            thirds,
            scale,
            minimum,
            BITS,
            ZERO,
            FLOATS,
            MINIMA,
            BY_ROW,
            R,
            W,
            L,
        )
        if KEPT > 0:
            result = tl.sum(sums * row_scale[:, None] + own_kept.to(tl.float32) * outliers[None, :], 1)
        elif BY_ROW:
            result = tl.sum(sums, 1) * row_scale
        else:
            result = tl.sum(sums, 1)
        if BY_ROW:
            ahead, valid = tile_outputs(tile, outputs, R, GATE)
            row_scale = tl.load(scales + ahead, valid, 0.0)
            if KEPT > 0:
                own_kept = load_kept_tile(kept, start, tile, outputs, KEPT, places, GATE, EVEN, R)
        if HAS_BIAS:
            result += tl.load(bias + own, exist, 0.0).to(tl.float32)
        if GATE != "":
            gate, passing = tl.split(tl.trans(tl.reshape(result.to(kind).to(tl.float32), [2, R // 2])))
            opened = activation(gate, GATE).to(kind).to(tl.float32)
            at = tile_now * (R // 2) + tl.arange(0, R // 2)
            tl.store(y + at, (opened * passing).to(kind), at < outputs // 2)
        elif BEST:
            score = result.to(kind).to(tl.float32)
            score = tl.where(score == score, score, float("inf"))
            better = exist & (score > top)
            top = tl.where(better, score, top)
            place = tl.where(better, own, place)
        else:
            tl.store(y + own, result.to(kind), exist)
        codes, thirds = next_codes, next_thirds
        raw_scale, raw_minimum, raw_outer = next_scale, next_minimum, next_outer
    if BEST:
        highest = tl.max(top, 0)
        tl.store(y + tl.program_id(0), highest)
        tl.store(indices + tl.program_id(0), tl.min(tl.where(top == highest, place, outputs), 0))


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
    if weight.form.bits == 4 and weight.group < 128:  # scales of many groups need registers, too
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
    kept: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """x (1, columns), contiguous, times the weight; gated if `gate` is given. `kept`: outlier columns (int32, -1 for
    none) and their weights (outputs, as many); the codes there are zero."""
    return _launch(x, weight, bias, gate, False, plan, kept)[0]


def most_kept(columns: int) -> int:
    """Outlier columns that fit into a row of 8-bit codes: each thread may add one for each output."""
    return power_of_two(triton.cdiv(columns, 4)) // 4


def best_of_row(x: Tensor | Unnormed, weight: WordWeight, bias: Tensor | None, plan: GemvPlan | None = None) -> Tensor:
    """Argmax over the outputs of `one_row`: only the best one of each program is stored."""
    return best_of_parts(*_launch(x, weight, bias, "", True, plan), weight.shape[0])


def _divides(form: Form, outputs: int, tile: int, gated: bool) -> bool:
    """Whether tiles divide the outputs, and each half of a gated tile starts at a block of interleaved rows."""
    sides = 2 if gated else 1
    if outputs % tile or (form.paired and tile // sides < 2):
        return False
    return not form.paired or (outputs // sides) % INTERLEAVED_ROWS == 0


def _launch(
    x: Tensor | Unnormed,
    weight: WordWeight,
    bias: Tensor | None,
    gate: str,
    best: bool,
    plan: GemvPlan | None,
    kept: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The outputs; or the highest output of each program, and its index."""
    before = x if isinstance(x, Unnormed) else None
    row = x.x if isinstance(x, Unnormed) else x
    outputs, columns = weight.shape
    plan = plan or persistent_plan(weight, before is not None)
    length = weight.group // weight.form.per_word
    width = max(length, power_of_two(weight.words.shape[1]))
    warps = min(MOST_WARPS, plan.groups * max(1, width // (32 * plan.words)))
    # Short rows have smaller programs than the plans were measured with, so more of them fit.
    usual = USUAL * 8 // max(8, weight.form.per_word)
    more = max(1, plan.groups * usual // (32 * plan.words) // warps)
    programs = min(triton.cdiv(outputs, plan.outputs), plan.programs * more * multiprocessors(row.device))
    if best:
        y = torch.empty(1, programs, dtype=torch.float32, device=row.device)
        indices = torch.empty(1, programs, dtype=torch.int32, device=row.device)
    else:
        y = indices = torch.empty(1, outputs // 2 if gate else outputs, dtype=row.dtype, device=row.device)
    delta, joined, norm, eps, offset = (
        (row, y, y, 0.0, 0.0)
        if before is None
        else (before.delta, before.joined, before.weight, before.eps, before.offset)
    )
    registers, share = plan.registers, REGISTERS // (32 * warps * plan.programs * more) // 8 * 8
    if kept is not None and registers is None and share >= LEAST_REGISTERS:
        registers = share  # outlier columns need some, but the plan's programs must still fit side by side
    bounded = {} if registers is None or INTERPRETED else {"maxnreg": registers}
    persistent_kernel[(programs,)](
        row,
        delta,
        joined,
        norm,
        eps,
        offset,
        row if bias is None else bias,
        y,
        indices,
        *weight.tensors(),
        *(kept or (y, y)),
        0,
        outputs,
        columns,
        **weight.constants(),
        HAS_BIAS=bias is not None,
        GATE=gate,
        BEST=best,
        NORM=before is not None,
        SHIFTED=offset != 0.0,
        KEPT=0 if kept is None else len(kept[0]),
        GROUPS=weight.groups,
        EVEN=_divides(weight.form, outputs, plan.outputs, bool(gate)),
        R=plan.outputs,
        W=width,
        L=length,
        num_warps=warps,
        **bounded,
        **overlapped(row),
    )
    return y, indices
