"""Quantized weights times a block of rows, on matrix units.

A program owns a tile of outputs by rows. Weights are dequantized in registers, in float32, to exactly the numbers of
`dequantize`, and rounded once to the type of the activations; products are summed in float32. Outputs are the first
dimension of a tile: matrix units want 64 there, which few rows could not fill.

Where a whole row shares its step, codes themselves are multiplied, which every type holds exactly, and the step comes
last. Few outputs leave multiprocessors without work: then several programs share the columns of a tile, and a second
kernel adds their sums up, always in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.triton.launch import overlapped, power_of_two, processors, start_next, wait_for_inputs
from bankfull.ops.triton.quantized_codes import exponent, power, steps_and_lows, tiny
from bankfull.ops.triton.quantized_layout import WordWeight

COLUMNS = 128
"""Of a tile, at a time."""
ENOUGH_OUTPUTS = 16384
"""From here on tiles of 128 outputs are enough for all multiprocessors; below, tiles have 64."""
HELD_BACK = 60
"""Numbers are multiplied 2 ** -60 times as large as they are: the factor that codes wait for, times a step, would not
be a float32. For float16, which would not hold such numbers, it takes two factors instead."""


@triton.jit
def numbers_of(
    codes,
    upper,
    factor,
    shift,
    J: tl.constexpr,
    BITS: tl.constexpr,
    FLOATS: tl.constexpr,
    HELD: tl.constexpr,
    KIND: tl.constexpr,
):
    """Code j of each word as a number, times 2 ** -HELD: code * factor + shift, where `shift` is that small already."""
    code = tiny(codes, upper, J, BITS, FLOATS)
    if HELD == 0:
        number = (code * power(64)) * (factor * power(exponent(J, BITS, FLOATS) - 64)) + shift
    else:
        number = code * (factor * power(exponent(J, BITS, FLOATS) - HELD)) + shift
    return number.to(KIND)


@triton.jit
def steps_of(
    steps,
    lows,
    outer_steps,
    output,
    group,
    groups,
    ZERO: tl.constexpr,
    NESTED: tl.constexpr,
    LOWS: tl.constexpr,
    GROUP: tl.constexpr,
    HELD: tl.constexpr,
):
    """Of groups [T] of outputs [BN, 1]: what codes are multiplied with, and what is added then, times 2 ** -HELD; both
    [BN, T]. Past the end there is nothing to multiply: any number will do."""
    known = tl.minimum(group, groups - 1)[None, :]
    factor, low = steps_and_lows(steps, lows, outer_steps, output, known, groups, None, NESTED, LOWS, GROUP)
    shift = factor * (-ZERO * power(-HELD))
    if LOWS != 0:
        shift = low * power(-HELD)
    return factor, shift


@triton.jit
def for_each_word(of_groups, BN: tl.constexpr, T: tl.constexpr, L: tl.constexpr):
    """[BN, T] repeated for the L words of each group; of a single one, it is what every word gets."""
    found = of_groups
    if T > 1:
        found = tl.reshape(tl.broadcast_to(of_groups[:, :, None], [BN, T, L]), [BN, T * L])
    return found


@triton.jit(do_not_specialize=["rows"])
def tiles_kernel(
    x,
    bias,
    y,
    words,
    high,
    steps,
    lows,
    outer_steps,
    rows,
    outputs,
    columns,
    groups,
    x_stride,
    share,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    FLOATS: tl.constexpr,
    NESTED: tl.constexpr,
    LOWS: tl.constexpr,
    BY_ROW: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HELD: tl.constexpr,
    PARTIAL: tl.constexpr,
    EVEN: tl.constexpr,
    LATE: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    T: tl.constexpr,
    L: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """T groups at a time, of the `share` of them that begins where the program's place in the second dimension says.
    PARTIAL sums are stored as they are, one plane for each share. EVEN: T divides the groups of an output.

    Outputs and rows that are not there are taken from the beginning instead, and dropped at the end: so loads that need
    no mask have none.
    """
    start_next(OVERLAP)
    # One step for all words at a time: their sums may be multiplied.
    late: tl.constexpr = BY_ROW or (LATE and T == 1 and LOWS == 0)
    row_blocks = tl.cdiv(rows, BM)
    program = tl.program_id(0)
    row = (program % row_blocks) * BM + tl.arange(0, BM)
    output = (program // row_blocks) * BN + tl.arange(0, BN)
    some_row, some_output = (row % rows).to(tl.int64), (output % outputs).to(tl.int64)
    start = tl.program_id(1) * share
    last = tl.minimum(start + share, groups)
    kind: tl.constexpr = x.dtype.element_ty
    pairs: tl.constexpr = GROUP // L // 2

    word = tl.arange(0, T * L)
    words_at = some_output[:, None] * (groups * L) + start * L + word[None, :]
    # Of each pair of codes, those of neighbouring words belong to neighbouring pairs of columns: 2 L in a run.
    behind = tl.arange(0, 2 * T * L)
    column = behind // (2 * L) * GROUP + behind % (2 * L)
    x_at = x + some_row[None, :] * x_stride + (start * GROUP + column)[:, None]
    group = start + tl.arange(0, T)
    summed = tl.zeros([BN, BM], dtype=tl.float32)
    if not BY_ROW:
        factor, shift = steps_of(
            steps, lows, outer_steps, some_output[:, None], group, groups, ZERO, NESTED, LOWS, GROUP, HELD
        )
    wait_for_inputs(OVERLAP)
    for first in range(start, last, T):
        if EVEN:
            codes = tl.load(words + words_at)
        else:
            here = (word < (last - first) * L)[None, :]
            codes = tl.load(words + words_at, here, 0)
        codes = codes.to(tl.uint32, bitcast=True)
        upper = codes
        if BITS == 6:
            upper = tl.load(high + words_at) if EVEN else tl.load(high + words_at, here, 0)
            upper = upper.to(tl.uint16, bitcast=True).to(tl.uint32)
        if late:
            multiplier = tl.full([1, 1], 1.0, tl.float32)
            added = multiplier * (-ZERO * power(-HELD))
        else:
            multiplier = for_each_word(factor, BN, T, L)
            added = for_each_word(shift, BN, T, L)
        product = summed
        if not BY_ROW:
            if late:
                product = tl.zeros([BN, BM], dtype=tl.float32)
                step = factor
            # A step ahead: these loads are too small for the pipeline that the others go through.
            group += T
            factor, shift = steps_of(
                steps,
                lows,
                outer_steps,
                some_output[:, None],
                group,
                groups,
                ZERO,
                NESTED,
                LOWS,
                GROUP,
                HELD,
            )
        for i in tl.static_range(pairs):
            even = numbers_of(codes, upper, multiplier, added, i, BITS, FLOATS, HELD, kind)
            odd = numbers_of(codes, upper, multiplier, added, i + pairs, BITS, FLOATS, HELD, kind)
            weight = tl.reshape(tl.join(even, odd), [BN, 2 * T * L])
            if EVEN and not PADDED:
                block = tl.load(x_at + i * 2 * L)
            else:
                near = (behind < (last - first) * 2 * L) & (first * GROUP + column + i * 2 * L < columns)
                block = tl.load(x_at + i * 2 * L, near[:, None], 0.0)
            product = tl.dot(weight, block, product, input_precision="ieee")
        if late and not BY_ROW:
            summed += product * step
        else:
            summed = product
        words_at += T * L
        x_at += T * GROUP
    at = row.to(tl.int64)[None, :] * outputs + output[:, None]
    known = (output < outputs)[:, None] & (row < rows)[None, :]
    if PARTIAL:
        tl.store(y + tl.program_id(1).to(tl.int64) * rows * outputs + at, summed, known)
    else:
        result = summed * power(HELD)
        if BY_ROW:
            result = result * tl.load(steps + some_output)[:, None]
        if HAS_BIAS:
            result += tl.load(bias + some_output).to(tl.float32)[:, None]
        tl.store(y + at, result.to(y.dtype.element_ty), known)


@triton.jit
def shares_kernel(
    sums,
    steps,
    bias,
    y,
    outputs,
    size,
    BY_ROW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HELD: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Adds up what `tiles_kernel` left in planes of `size` sums."""
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    result = tl.zeros([BLOCK], dtype=tl.float32)
    for share in tl.static_range(SHARES):
        result += tl.load(sums + share * size + at, inside, 0.0)
    result = result * power(HELD)
    if BY_ROW:
        result = result * tl.load(steps + at % outputs, inside, 0.0)
    if HAS_BIAS:
        result += tl.load(bias + at % outputs, inside, 0.0).to(tl.float32)
    tl.store(y + at, result.to(y.dtype.element_ty), inside)


@dataclass(frozen=True, slots=True)
class Tiling:
    rows: int
    outputs: int
    warps: int
    stages: int
    late: bool = True
    """Where a group is as wide as a step, its sums are multiplied, not its codes: fewer roundings, more registers."""
    shares: int | None = None
    """Programs that share a tile's columns, at most; None: as many as keep all multiprocessors busy."""


def tiling_for(x: Tensor, outputs: int) -> Tiling:
    rows = x.shape[0]
    if x.dtype == torch.float32:  # on plain units, whose tiles lie in registers
        return Tiling(16 if rows <= 16 else 32, 64, 4, 2)
    if rows > 64:
        return Tiling(128, 128, 8, 3, late=False)
    return Tiling(max(16, power_of_two(rows)), 64 if outputs < ENOUGH_OUTPUTS else 128, 4, 4)


def many_rows(x: Tensor, weight: WordWeight, bias: Tensor | None, tiling: Tiling | None = None) -> Tensor:
    """x (rows, columns), dense, times the weight."""
    outputs, columns = weight.shape
    rows = x.shape[0]
    tiling = tiling or tiling_for(x, outputs)
    y = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(outputs, tiling.outputs) * triton.cdiv(rows, tiling.rows)
    together = COLUMNS // weight.group
    share, shares = _shares(tiles, triton.cdiv(weight.groups, together), processors(x.device), tiling.shares)
    held = 0 if x.dtype == torch.float16 else HELD_BACK
    sums = y if shares == 1 else torch.empty(shares, rows, outputs, dtype=torch.float32, device=x.device)
    given = x if bias is None else bias
    tiles_kernel[(tiles, shares)](
        x,
        given,
        sums,
        *weight.tensors(),
        rows,
        outputs,
        columns,
        weight.groups,
        x.stride(0),
        share * together,
        **weight.constants(),
        HAS_BIAS=bias is not None,
        HELD=held,
        PARTIAL=shares > 1,
        EVEN=weight.groups % together == 0,
        LATE=tiling.late,
        BN=tiling.outputs,
        BM=tiling.rows,
        T=together,
        L=weight.group // weight.form.per_word,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **overlapped(x),
    )
    if shares > 1:
        block = 1024
        shares_kernel[(triton.cdiv(y.numel(), block),)](
            sums,
            weight.steps,
            given,
            y,
            outputs,
            y.numel(),
            BY_ROW=weight.form.by_row,
            HAS_BIAS=bias is not None,
            HELD=held,
            SHARES=shares,
            BLOCK=block,
            num_warps=4,
            **overlapped(x),
        )
    return y


def _shares(tiles: int, steps: int, multiprocessors: int, most: int | None) -> tuple[int, int]:
    """How many steps a program takes, and how many programs share a tile: so many that there are about two for each
    multiprocessor, as long as each has a few steps."""
    shares = 1
    while shares < (16 if most is None else most) and steps >= 8 * shares:
        if most is None and tiles * shares * 2 > 2 * multiprocessors + tiles:
            break
        shares *= 2
    share = triton.cdiv(steps, shares)
    return share, triton.cdiv(steps, share)
