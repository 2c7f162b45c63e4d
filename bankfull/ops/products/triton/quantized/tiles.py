"""Quantized GEMM for a block of rows, on tensor cores.

A program owns a tile of outputs by rows. Weights are dequantized in registers in float32, to exactly the values of
`dequantize`, and rounded once to the activations' dtype; accumulators are float32. Outputs are the first dimension of a
tile: tensor cores need 64 there, which few rows could not fill.

With one scale per row, the codes themselves are multiplied, exact in every dtype, and the scale is applied last. Few
outputs would leave multiprocessors idle: then several programs split the columns of a tile (split-K), and a second
kernel adds their sums in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.products.triton.operands import ProductInput, ProductOutput
from bankfull.ops.products.triton.quantized.codes import exponent, power, scales_and_minima, subnormal, third_bits
from bankfull.ops.products.triton.quantized.layout import WordWeight
from bankfull.ops.triton.launch import (
    INTERPRETED,
    cdiv,
    multiprocessors,
    overlapped,
    power_of_two,
    start_next,
    wait_for_inputs,
)

PLAIN = tl.constexpr(INTERPRETED)
COLUMNS = 128
"""Columns of a tile per iteration."""
ENOUGH_OUTPUTS = 16384
"""From this many outputs on, tiles of 128 outputs fill all multiprocessors; below, tiles have 64."""
DOWNSCALE = 60
"""Weights are multiplied by 2 ** -60: the factor that scales up codes, times a scale, would overflow float32. float16
cannot hold such small values, so it applies two factors instead."""


@triton.jit
def dequantized(
    codes, upper, factor, shift, J: tl.constexpr, FORM: tl.constexpr, DOWN: tl.constexpr, KIND: tl.constexpr
):
    """Code j of each word as a value times 2 ** -HELD: code * factor + shift, with `shift` already scaled."""
    code = subnormal(codes, upper, J, FORM)
    if DOWN == 0:
        number = (code * power(64)) * (factor * power(exponent(J, FORM.bits, FORM.floats) - 64)) + shift
    else:
        number = code * (factor * power(exponent(J, FORM.bits, FORM.floats) - DOWN)) + shift
    return number.to(KIND)


@triton.jit
def pair_of_weights(
    codes, upper, factor, shift, J: tl.constexpr, FORM: tl.constexpr, DOWN: tl.constexpr, KIND: tl.constexpr
):
    """`dequantized` codes j of both halves of each word, [BN, W], as adjacent columns, [BN, 2 W]."""
    if FORM.floats and FORM.bits == 4 and tl.bfloat16 == KIND:
        even, odd = pair_of_floats(codes, factor * power(exponent(J, FORM.bits, FORM.floats) - DOWN), J)
    else:
        pairs: tl.constexpr = FORM.group // FORM.length // 2
        even = dequantized(codes, upper, factor, shift, J, FORM, DOWN, KIND)
        odd = dequantized(codes, upper, factor, shift, J + pairs, FORM, DOWN, KIND)
    return tl.reshape(tl.join(even, odd), [codes.shape[0], 2 * codes.shape[1]])


@triton.jit
def pair_of_floats(codes, factor, J: tl.constexpr):
    """4-bit floats j of both halves of each word as bfloat16, times a power of two. Sign, exponent and mantissa move to
    their places in both halves at once, which gives tiny numbers; one packed multiplication, exact, scales both up."""
    moved = codes >> (4 * J - 6) if J > 1 else codes << (6 - 4 * J)
    bits = (moved & 0x01C001C0) | ((codes << (12 - 4 * J)) & 0x80008000)
    if PLAIN:
        low = (bits << 16).to(tl.float32, bitcast=True) * factor
        high = (bits & 0xFFFF0000).to(tl.float32, bitcast=True) * factor
        return low.to(tl.bfloat16), high.to(tl.bfloat16)
    else:
        whole = factor.to(tl.uint32, bitcast=True)
        return tl.inline_asm_elementwise(
            "{ .reg .b32 found, none; mov.b32 none, 0x80008000; fma.rn.bf16x2 found, $2, $3, none;"
            " mov.b32 {$0, $1}, found; }",
            "=h,=h,r,r",
            [bits, (whole >> 16) | (whole & 0xFFFF0000)],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=1,
        )


@triton.jit
def group_scales(words, output, group, FORM: tl.constexpr, DOWN: tl.constexpr):
    """The factor of codes of groups [T] of outputs [BN, 1], and the term added to them, times 2 ** -HELD; both [BN, T].
    Values past the end are arbitrary, because they are multiplied by zero."""
    known = tl.minimum(group, words.groups - 1)[None, :]
    factor, minimum = scales_and_minima(words, output, known, None, FORM)
    shift = factor * (-FORM.zero * power(-DOWN))
    if FORM.minima != 0:
        shift = minimum * power(-DOWN)
    return factor, shift


@triton.jit
def per_word(of_groups, BN: tl.constexpr, T: tl.constexpr, L: tl.constexpr):
    """[BN, T] repeated for the L words of each group."""
    return tl.reshape(tl.broadcast_to(of_groups[:, :, None], [BN, T, L]), [BN, T * L])


@triton.jit(do_not_specialize=["count"])
def tiles_kernel(
    rows,
    out,
    words,
    count,
    split_length,
    FORM: tl.constexpr,
    DOWN: tl.constexpr,
    PARTIAL: tl.constexpr,
    EVEN: tl.constexpr,
    LATE: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    T: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Processes T groups per iteration, of the `split_length` groups that belong to the program's index in the second
    dimension. PARTIAL: store raw sums, one plane per split. EVEN: T divides the groups of an output.

    Out-of-range outputs and rows wrap around and are dropped at the end, so that their loads need no mask.
    """
    start_next(OVERLAP)
    # With one scale for all words of an iteration, the sum is scaled instead of each code.
    late: tl.constexpr = FORM.by_row or (LATE and T == 1 and FORM.minima == 0)
    L: tl.constexpr = FORM.length
    outputs, groups = words.outputs, words.groups
    row_blocks = tl.cdiv(count, BM)
    program = tl.program_id(0)
    row = (program % row_blocks) * BM + tl.arange(0, BM)
    output = (program // row_blocks) * BN + tl.arange(0, BN)
    some_row, some_output = (row % count).to(tl.int64), (output % outputs).to(tl.int64)
    start = tl.program_id(1) * split_length
    last = tl.minimum(start + split_length, groups)
    kind: tl.constexpr = rows.x.dtype.element_ty

    word = tl.arange(0, T * L)
    words_at = some_output[:, None] * (groups * L) + start * L + word[None, :]
    if FORM.bits == 3:
        two = tl.arange(0, T * L // 2)
        thirds_at = some_output[:, None] * (groups * L // 2) + start * L // 2 + two[None, :]
    # For each pair of codes, adjacent words belong to adjacent pairs of columns: runs of 2 L.
    behind = tl.arange(0, 2 * T * L)
    column = behind // (2 * L) * FORM.group + behind % (2 * L)
    x_at = rows.x + some_row[None, :] * rows.stride + (start * FORM.group + column)[:, None]
    group = start + tl.arange(0, T)
    summed = tl.zeros([BN, BM], dtype=tl.float32)
    if not FORM.by_row:
        factor, shift = group_scales(words, some_output[:, None], group, FORM, DOWN)
    wait_for_inputs(OVERLAP)
    for first in range(start, last, T):
        if EVEN:
            codes = tl.load(words.codes + words_at)
        else:
            here = (word < (last - first) * L)[None, :]
            codes = tl.load(words.codes + words_at, here, 0)
        codes = codes.to(tl.uint32, bitcast=True)
        upper = codes
        if FORM.bits == 6:
            upper = tl.load(words.high + words_at) if EVEN else tl.load(words.high + words_at, here, 0)
            upper = upper.to(tl.uint16, bitcast=True).to(tl.uint32)
        elif FORM.bits == 3:
            if EVEN:
                upper = tl.load(words.high + thirds_at)
            else:
                upper = tl.load(words.high + thirds_at, (two < (last - first) * L // 2)[None, :], 0)
            upper = third_bits(upper, BN, T * L)
            thirds_at += T * L // 2
        if late:
            multiplier = tl.full([1, 1], 1.0, tl.float32)
            added = multiplier * (-FORM.zero * power(-DOWN))
        else:
            multiplier = per_word(factor, BN, T, L)
            added = per_word(shift, BN, T, L)
        product = summed
        if not FORM.by_row:
            if late:
                product = tl.zeros([BN, BM], dtype=tl.float32)
                scale = factor
            # Loaded one iteration ahead: these loads are too small for Triton's pipelining.
            group += T
            factor, shift = group_scales(words, some_output[:, None], group, FORM, DOWN)
        for i in tl.static_range(FORM.group // L // 2):
            weight = pair_of_weights(codes, upper, multiplier, added, i, FORM, DOWN, kind)
            if EVEN and not FORM.padded:
                block = tl.load(x_at + i * 2 * L)
            else:
                near = (behind < (last - first) * 2 * L) & (first * FORM.group + column + i * 2 * L < words.columns)
                block = tl.load(x_at + i * 2 * L, near[:, None], 0.0)
            product = tl.dot(weight, block, product, input_precision="ieee")
        if late and not FORM.by_row:
            summed += product * scale
        else:
            summed = product
        words_at += T * L
        x_at += T * FORM.group
    at = row.to(tl.int64)[None, :] * outputs + output[:, None]
    known = (output < outputs)[:, None] & (row < count)[None, :]
    if PARTIAL:
        tl.store(out.y + tl.program_id(1).to(tl.int64) * count * outputs + at, summed, known)
    else:
        result = summed * power(DOWN)
        if FORM.by_row:
            result = result * tl.load(words.scales + some_output)[:, None]
        if out.bias is not None:
            result += tl.load(out.bias + some_output).to(tl.float32)[:, None]
        tl.store(out.y + at, result.to(out.y.dtype.element_ty), known)


@triton.jit
def reduce_splits_kernel(
    sums,
    scales,
    out,
    outputs,
    size,
    DOWN: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Adds the partial sums of `tiles_kernel`, in planes of `size`. It takes scales if there is one per row."""
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    result = tl.zeros([BLOCK], dtype=tl.float32)
    for split_length in tl.static_range(SPLITS):
        result += tl.load(sums + split_length * size + at, inside, 0.0)
    result = result * power(DOWN)
    if scales is not None:
        result = result * tl.load(scales + at % outputs, inside, 0.0)
    if out.bias is not None:
        result += tl.load(out.bias + at % outputs, inside, 0.0).to(tl.float32)
    tl.store(out.y + at, result.to(out.y.dtype.element_ty), inside)


@dataclass(frozen=True, slots=True)
class Tiling:
    rows: int
    outputs: int
    warps: int
    stages: int
    late: bool = True
    """If a group is as wide as an iteration, scale its sums instead of its codes: fewer roundings, more registers."""
    splits: int | None = None
    """Maximum programs per tile (split-K); None: as many as keep all multiprocessors busy."""


def tiling_for(x: Tensor, outputs: int) -> Tiling:
    rows = x.shape[0]
    if x.dtype == torch.float32:  # on CUDA cores, with tiles in registers
        return Tiling(16 if rows <= 16 else 32, 64, 4, 2)
    if rows > 64:
        return Tiling(128, 128, 8, 3, late=False)
    return Tiling(max(16, power_of_two(rows)), 64 if outputs < ENOUGH_OUTPUTS else 128, 4, 4)


def many_rows(x: Tensor, weight: WordWeight, bias: Tensor | None, tiling: Tiling | None = None) -> Tensor:
    """x (rows, columns), contiguous, times the weight."""
    outputs, groups, rows = weight.shape[0], weight.words.groups, x.shape[0]
    tiling = tiling or tiling_for(x, outputs)
    y = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    tiles = cdiv(outputs, tiling.outputs) * cdiv(rows, tiling.rows)
    together = COLUMNS // weight.form.group
    split_length, splits = _splits(tiles, cdiv(groups, together), multiprocessors(x.device), tiling.splits)
    down = 0 if x.dtype == torch.float16 else DOWNSCALE
    sums = y if splits == 1 else torch.empty(splits, rows, outputs, dtype=torch.float32, device=x.device)
    tiles_kernel[(tiles, splits)](
        ProductInput(x, x.stride(0)),
        ProductOutput(bias, sums),
        weight.words,
        rows,
        split_length * together,
        FORM=weight.form,
        DOWN=down,
        PARTIAL=splits > 1,
        EVEN=groups % together == 0,
        LATE=tiling.late,
        BN=tiling.outputs,
        BM=tiling.rows,
        T=together,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **overlapped(x),
    )
    if splits > 1:
        block = 1024
        reduce_splits_kernel[(cdiv(y.numel(), block),)](
            sums,
            weight.words.scales if weight.form.by_row else None,
            ProductOutput(bias, y),
            outputs,
            y.numel(),
            DOWN=down,
            SPLITS=splits,
            BLOCK=block,
            num_warps=4,
            **overlapped(x),
        )
    return y


def _splits(tiles: int, iterations: int, multiprocessors: int, most: int | None) -> tuple[int, int]:
    """Iterations per program, and programs per tile: about two programs per multiprocessor, as long as each has a few
    iterations."""
    splits = 1
    while splits < (16 if most is None else most) and iterations >= 8 * splits:
        if most is None and tiles * splits * 2 > 2 * multiprocessors + tiles:
            break
        splits *= 2
    split_length = cdiv(iterations, splits)
    return split_length, cdiv(iterations, split_length)
