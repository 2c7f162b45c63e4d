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

from bankfull.ops.reference.linear import Unnormed
from bankfull.ops.triton.launch import (
    INTERPRETED,
    multiprocessors,
    overlapped,
    power_of_two,
    start_next,
    wait_for_inputs,
)
from bankfull.ops.triton.pointwise import activation
from bankfull.ops.triton.quantized_fixed_point import (
    bytes_as_floats,
    bytes_of,
    dot4,
    fixed_point,
    group_sums,
    halves_as_floats,
    load_activations,
    load_norm_weights,
    planes,
    split_planes,
    split_runs,
)
from bankfull.ops.triton.quantized_layout import INTERLEAVED_ROWS, Form, WordWeight
from bankfull.ops.triton.quantized_rows import neighbours
from bankfull.ops.triton.sampling import best_of_parts

LONGEST = 4096
"""Maximum words per row: eight for each of 512 threads."""
MOST_WARPS = 16
USUAL = 512
"""Words per row of an 8B model with 4-bit codes, for which the plans were measured."""
MANY_OUTPUTS = 65536
"""Outputs of a head, after which no large kernel follows."""
INTERLEAVE = tl.constexpr(INTERLEAVED_ROWS)


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


@triton.jit
def load_tile(
    words,
    scales,
    minima,
    outer_scales,
    tile,
    outputs,
    NESTED: tl.constexpr,
    MINIMA: tl.constexpr,
    BY_ROW: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    GATE: tl.constexpr,
    EVEN: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
    L: tl.constexpr,
):
    """The words [R, W] of a tile, and the raw scales and minima of their groups for `group_scales`."""
    word = tl.arange(0, W)
    group = tl.arange(0, W // L)
    output, valid = tile_outputs(tile, outputs, R, GATE)
    side: tl.constexpr = outputs_per_side(R, GATE)
    # EVEN: tiles divide the outputs, and a tile contains all rows of an interleaved block.
    if EVEN:
        there = tile * side < outputs // (R // side)
        lanes = tl.arange(0, R)
        across = outputs.to(tl.int64) // (R // side)
        at = (lanes % side)[:, None] * (GROUPS * L) + word[None, :]
        if GATE != "":
            at = at + (lanes // side).to(tl.int64)[:, None] * (across * (GROUPS * L))
        words += (tile * side).to(tl.int64) * (GROUPS * L)
        inside = tl.broadcast_to(there, [1, W])
        known = tl.broadcast_to(there, [1, W // L])
        if W != GROUPS * L:
            inside = inside & (word < GROUPS * L)[None, :]
            known = known & (group < GROUPS)[None, :]
    else:
        at = output.to(tl.int64)[:, None] * (GROUPS * L) + word[None, :]
        inside = valid[:, None] & (word < GROUPS * L)[None, :]
        known = valid[:, None] & (group < GROUPS)[None, :]
    # Read once per row, so not kept in the cache.
    codes = tl.load(words + at, inside, 0, eviction_policy="evict_first").to(tl.uint32, bitcast=True)
    scale = tl.zeros([1, 1], tl.int32)
    minimum = scale
    outer = scale
    outers: tl.constexpr = GROUPS // (256 // GROUP) if NESTED else 1
    if NESTED and MINIMA != 0:
        if EVEN:
            # For T rows, a word holds scale and minimum of two rows, or the outer ones of one. Groups come first, so
            # that threads are laid along them and each holds the scales of its words.
            T: tl.constexpr = min(side, INTERLEAVE)
            blocks = tl.arange(0, R // T)
            first = tile * side + blocks % (side // T) * T
            first = first.to(tl.int64) + (blocks // (side // T)).to(tl.int64) * across
            rows = (first // INTERLEAVE)[None, :, None]
            own = first % INTERLEAVE if T < INTERLEAVE else first * 0
            own = own[None, :, None]
            here = tl.broadcast_to(tl.reshape(known, [W // L, 1, 1]), [W // L, R // T, 1])
            pairs = tl.arange(0, T // 2)[None, None, :]
            at = (rows * GROUPS + group[:, None, None]) * (INTERLEAVE // 2) + own // 2 + pairs
            scale = tl.load(scales.to(tl.pointer_type(tl.int32)) + at, here, 0)
            each = tl.arange(0, T)[None, None, :]
            at = (rows * outers + (group // (256 // GROUP))[:, None, None]) * INTERLEAVE + own + each
            outer = tl.load(outer_scales + at, here, 0)
        else:
            rows = output.to(tl.int64)[:, None] // INTERLEAVE
            own = output[:, None] % INTERLEAVE
            scale = tl.load(scales + (rows * GROUPS + group[None, :]) * INTERLEAVE + own, known, 0).to(tl.int32)
            at = (rows * outers + (group // (256 // GROUP))[None, :]) * INTERLEAVE + own
            outer = tl.load(outer_scales + at, known, 0)
    elif not BY_ROW:
        at = output.to(tl.int64)[:, None] * GROUPS + group[None, :]
        scale = tl.load(scales + at, known, 0)
        if NESTED:
            at = output.to(tl.int64)[:, None] * outers + (group // (256 // GROUP))[None, :]
            outer = tl.load(outer_scales + at, known, 0)
        if MINIMA != 0:
            minimum = tl.load(minima + at, known, 0)
    return codes, scale, minimum, outer


@triton.jit
def as_rows(x, R: tl.constexpr, T: tl.constexpr, G: tl.constexpr):
    """[G, R / T, T] as [R, G]."""
    return tl.reshape(tl.permute(tl.reshape(x, [G, R // T, T]), (1, 2, 0)), [R, G])


@triton.jit
def group_scales(
    scale,
    minimum,
    outer,
    NESTED: tl.constexpr,
    MINIMA: tl.constexpr,
    EVEN: tl.constexpr,
    GATE: tl.constexpr,
    R: tl.constexpr,
    G: tl.constexpr,
):
    """Scales and minima (signed), [R, G] float32. Without minima the second result is unused."""
    if NESTED and MINIMA != 0:
        T: tl.constexpr = min(outputs_per_side(R, GATE), INTERLEAVE)
        outer_scale, outer_minimum = halves_as_floats(outer)
        small, small_minimum, other, other_minimum = bytes_as_floats(scale)
        if EVEN:
            small, small_minimum = (
                as_rows(tl.join(small, other), R, T, G),
                as_rows(tl.join(small_minimum, other_minimum), R, T, G),
            )
            outer_scale, outer_minimum = as_rows(outer_scale, R, T, G), as_rows(outer_minimum, R, T, G)
        return small * outer_scale, MINIMA * (small_minimum * outer_minimum)
    else:
        scales = scale.to(tl.float32)
        if NESTED:
            scales = scales * outer.to(tl.float32)
        return scales, MINIMA * minimum.to(tl.float32)


@triton.jit
def products(
    upper,
    lower,
    factors,
    whole,
    codes,
    scale,
    minimum,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    MINIMA: tl.constexpr,
    BY_ROW: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
    L: tl.constexpr,
):
    """The sum of each output, [R]. Integer sums, over a thread's words of a group, are exact."""
    run: tl.constexpr = neighbours(L)
    words = split_runs(codes, R, W, run)
    high = tl.zeros([R, W // run], tl.int32)
    rest = tl.zeros([R, W // run], tl.int32)
    for i in tl.static_range(run):
        apart = bytes_of(words[i], BITS)
        for j in tl.static_range(len(apart)):
            high = dot4(apart[j], upper[i * len(apart) + j], high, True)
            rest = dot4(apart[j], lower[i * len(apart) + j], rest, False)
    exact = high * 256 + rest
    found = tl.reshape(exact.to(tl.float32), [R, W // L, L // run]) * tl.reshape(factors, [1, W // L, 1])
    # A group's zero point and minimum are applied in only one of its threads.
    first = (tl.arange(0, L // run) == 0)[None, None, :]
    if ZERO != 0:
        found -= tl.where(first, ZERO * tl.reshape(whole, [1, W // L, 1]), 0.0)
    if not BY_ROW:
        found = found * scale[:, :, None]
        if MINIMA != 0:
            found += tl.where(first, minimum[:, :, None] * tl.reshape(whole, [1, W // L, 1]), 0.0)
    return tl.sum(tl.reshape(found, [R, W // run]), 1)


@triton.jit
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
    GROUPS: tl.constexpr,
    EVEN: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
    L: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """BEST: each program stores its highest output to `y`, and the first index that has it to `indices`; a NaN counts
    as infinity."""
    start_next(OVERLAP)
    tile = tl.program_id(0)
    # Weights are loaded before the activations are ready.
    codes, raw_scale, raw_minimum, raw_outer = load_tile(
        words, scales, minima, outer_scales, tile, outputs, NESTED, MINIMA, BY_ROW, GROUP, GROUPS, GATE, EVEN, R, W, L
    )
    row_scale = tl.zeros([R], tl.float32)
    if BY_ROW:
        output, valid = tile_outputs(tile, outputs, R, GATE)
        row_scale = tl.load(scales + output, valid, 0.0)
    gains = ()
    if NORM:
        gains = load_norm_weights(norm, GROUPS, columns, GROUP, W, L, PADDED)
    wait_for_inputs(OVERLAP)
    line = load_activations(x, delta, joined, gains, eps, offset, GROUPS, columns, GROUP, W, L, PADDED, NORM, SHIFTED)
    whole = group_sums(line, W, L)
    numbers, factors = fixed_point(line, W, L)
    upper = split_planes(planes(numbers, 1), W, neighbours(L))
    lower = split_planes(planes(numbers, 0), W, neighbours(L))
    kind = x.dtype.element_ty
    top = tl.full([R], -float("inf"), tl.float32)
    place = tl.zeros([R], tl.int32)
    tiles = tl.cdiv(outputs, R)
    while tile < tiles:
        own, exist = tile_outputs(tile, outputs, R, GATE)
        tile_now = tile
        tile += tl.num_programs(0)
        next_codes, next_scale, next_minimum, next_outer = load_tile(
            words,
            scales,
            minima,
            outer_scales,
            tile,
            outputs,
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
        result = products(upper, lower, factors, whole, codes, scale, minimum, BITS, ZERO, MINIMA, BY_ROW, R, W, L)
        if BY_ROW:
            result = result * row_scale
            ahead, valid = tile_outputs(tile, outputs, R, GATE)
            row_scale = tl.load(scales + ahead, valid, 0.0)
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
        codes, raw_scale, raw_minimum, raw_outer = next_codes, next_scale, next_minimum, next_outer
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
    """Whether the kernel supports these weights: 4- or 8-bit integers, with 16-bit activations, which fixed point
    represents as well."""
    plain = form.bits in (4, 8) and not form.floats
    return plain and dtype in (torch.bfloat16, torch.float16) and columns <= LONGEST * form.per_word


def is_fastest(form: Form, columns: int, dtype: torch.dtype | None) -> bool:
    """Whether it is faster than non-persistent programs. On an H200, in a chain of the layers of an 8B model, it is,
    except for long rows of 8-bit codes. Shorter rows than in that model were not measured."""
    return supports(form, columns, dtype) and 2048 <= columns <= (LONGEST * 8 if form.bits == 4 else 8192)


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
    x: Tensor | Unnormed, weight: WordWeight, bias: Tensor | None, gate: str = "", plan: GemvPlan | None = None
) -> Tensor:
    """x (1, columns), contiguous, times the weight; gated if `gate` is given."""
    return _launch(x, weight, bias, gate, False, plan)[0]


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
    x: Tensor | Unnormed, weight: WordWeight, bias: Tensor | None, gate: str, best: bool, plan: GemvPlan | None
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
    more = max(1, plan.groups * USUAL // (32 * plan.words) // warps)
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
    bounded = {} if plan.registers is None or INTERPRETED else {"maxnreg": plan.registers}
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
        outputs,
        columns,
        **weight.constants(),
        HAS_BIAS=bias is not None,
        GATE=gate,
        BEST=best,
        NORM=before is not None,
        SHIFTED=offset != 0.0,
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
