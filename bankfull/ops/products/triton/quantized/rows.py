"""Quantized GEMV for very few rows: bound by reading the weights once.

A program owns a few outputs and iterates over their columns. A thread holds four adjacent words of each output: one
16-byte load, 32 codes of 4 bits. Activations are loaded and widened once for all outputs of a program. Next to memory,
instructions per code limit the speed: a mask and a float32 multiplication, and three to four in total with activations,
addresses and sums. Scales are applied once per word.

The factors that scale up codes (`quantized_codes.subnormal`) are applied to the activations, except for 2 ** -85, which
is undone at the end: so sums are correct for activations below 2 ** 63, and none above about 1e-12 loses a bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.pointwise.triton import activation
from bankfull.ops.products.triton.operands import Kept, ProductInput, ProductOutput
from bankfull.ops.products.triton.outlier_rows import gather, load_kept, load_numbers
from bankfull.ops.products.triton.quantized.codes import exponent, power, scales_and_minima, subnormal, third_bits
from bankfull.ops.products.triton.quantized.layout import WordWeight
from bankfull.ops.triton.launch import cdiv, overlapped, power_of_two, start_next, wait_for_inputs

OUTPUTS, FEW_OUTPUTS = 8, 4
"""Outputs per program: more reduce the cost of activations, fewer give more programs."""
WORDS_PER_WARP = 128
"""Words of one output per warp and iteration: 16 bytes per thread."""

SMALL = tl.constexpr(85)


@triton.constexpr_function
def neighbours(L):
    """Words of a group that a thread holds."""
    return min(4, L)


@triton.jit
def load_words(words, outputs, valid, first, FORM: tl.constexpr, W: tl.constexpr):
    """Words [outputs, W] starting at `first`, their upper bits, and the scales and minima [outputs, W / L] of their
    groups."""
    L: tl.constexpr = FORM.length
    word = first + tl.arange(0, W)
    inside = valid[:, None] & (word < words.groups * L)[None, :]
    at = outputs.to(tl.int64)[:, None] * (words.groups * L) + word[None, :]
    # Read once per row, so not kept in the cache.
    codes = tl.load(words.codes + at, inside, 0, eviction_policy="evict_first").to(tl.uint32, bitcast=True)
    upper = codes
    if FORM.bits == 6:
        upper = tl.load(words.high + at, inside, 0).to(tl.uint16, bitcast=True).to(tl.uint32)
    elif FORM.bits == 3:
        two = first // 2 + tl.arange(0, W // 2)
        inside = valid[:, None] & (two < words.groups * L // 2)[None, :]
        at = outputs.to(tl.int64)[:, None] * (words.groups * L // 2) + two[None, :]
        upper = third_bits(tl.load(words.high + at, inside, 0, eviction_policy="evict_first"), valid.shape[0], W)
    scale = tl.zeros([1, 1], dtype=tl.float32)
    minimum = scale
    if not FORM.by_row:
        group = first // L + tl.arange(0, W // L)
        known = valid[:, None] & (group < words.groups)[None, :]
        scale, minimum = scales_and_minima(words, outputs.to(tl.int64)[:, None], group[None, :], known, FORM)
    return codes, upper, scale, minimum


@triton.jit
def pair_of(x, pair, inside, columns, PADDED: tl.constexpr):
    """Both activations of each pair, as float32."""
    kind: tl.constexpr = x.dtype.element_ty
    if PADDED or kind == tl.float32:
        column = 2 * pair
        even = tl.load(x + column, inside & (column < columns), 0.0).to(tl.float32)
        odd = tl.load(x + column + 1, inside & (column + 1 < columns), 0.0).to(tl.float32)
    else:  # one load for two 16-bit elements; a bfloat16 is the upper half of a float32
        both = tl.load(x.to(tl.pointer_type(tl.uint32)) + pair, inside, 0)
        if kind == tl.bfloat16:
            even = (both << 16).to(tl.float32, bitcast=True)
            odd = (both & 0xFFFF0000).to(tl.float32, bitcast=True)
        else:
            even = (both & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
            odd = (both >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return even, odd


@triton.jit
def products(x, held, first, words, FORM: tl.constexpr, R: tl.constexpr, W: tl.constexpr):
    """Products of words with their activations, summed over a thread's adjacent words of a group: [outputs, W /
    RUN]."""
    codes, upper, scale, minimum = held
    L: tl.constexpr = FORM.length
    word = first + tl.arange(0, W)
    pair = word // L * (FORM.group // 2) + word % L
    inside = word < words.groups * L
    summed = tl.zeros([R, W], dtype=tl.float32)
    whole = tl.zeros([1, W], dtype=tl.float32)
    pairs: tl.constexpr = FORM.group // L // 2
    for i in tl.static_range(pairs):
        even, odd = pair_of(x, pair + i * L, inside, words.columns, FORM.padded)
        if FORM.zero != 0 or FORM.minima != 0:
            whole += (even + odd)[None, :]
        even *= power(exponent(i, FORM.bits, FORM.floats) - SMALL)
        odd *= power(exponent(i + pairs, FORM.bits, FORM.floats) - SMALL)
        summed += even[None, :] * subnormal(codes, upper, i, FORM)
        summed += odd[None, :] * subnormal(codes, upper, i + pairs, FORM)
    run: tl.constexpr = neighbours(L)
    found = tl.sum(tl.reshape(summed, [R, W // run, run]), 2) * power(SMALL)
    whole = tl.sum(tl.reshape(whole, [1, W // run, run]), 2)
    if FORM.zero != 0:
        found -= FORM.zero * whole
    if not FORM.by_row and run == L:
        found = found * scale
        if FORM.minima != 0:
            found += minimum * whole
    elif not FORM.by_row:
        found = tl.reshape(found, [R, W // L, L // run]) * scale[:, :, None]
        if FORM.minima != 0:
            found += minimum[:, :, None] * tl.reshape(whole, [1, W // L, L // run])
        found = tl.reshape(found, [R, W // run])
    return found


@triton.jit(do_not_specialize=["start"])
def few_rows_kernel(
    rows,
    out,
    words,
    kept,
    start,
    count,
    FORM: tl.constexpr,
    GATE: tl.constexpr,
    KEPT: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
    ONCE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """With GATE, the name of an activation, a program's outputs are pairs of a gate and its factor. KEPT: outlier
    columns (`outlier_rows`)."""
    start_next(OVERLAP)
    outputs = words.outputs
    program = tl.program_id(0)
    row = (program % count).to(tl.int64)
    lanes = tl.arange(0, R)
    if GATE != "":
        pair = (program // count) * (R // 2) + lanes // 2
        valid = pair < outputs // 2
        output = pair + (lanes % 2) * (outputs // 2)
    else:
        output = (program // count) * R + lanes
        valid = output < outputs
    x = rows.x + row * rows.stride

    # Weights are loaded before the activations are ready.
    held = load_words(words, output, valid, 0, FORM, W)
    if FORM.by_row:
        row_scale = tl.load(words.scales + output, valid, 0.0)
    places: tl.constexpr = W // neighbours(FORM.length)
    if KEPT > 0:
        own_kept = load_kept(kept.weights, output, valid, 0, start, KEPT, places)
        numbers = load_numbers(kept.columns, 0, KEPT, places)
    wait_for_inputs(OVERLAP)
    if KEPT > 0:
        outliers = gather(ProductInput(x, 0), 1.0, numbers)
    if ONCE:
        summed = products(x, held, 0, words, FORM, R, W)
    else:
        summed = tl.zeros([R, places], dtype=tl.float32)
        for first in range(0, words.groups * FORM.length, W):
            now = held
            held = load_words(words, output, valid, first + W, FORM, W)
            summed += products(x, now, first, words, FORM, R, W)
    if KEPT > 0:
        summed = summed * row_scale[:, None] + own_kept.to(tl.float32) * outliers[None, :]
        for first in range(places, KEPT, places):
            own_kept = load_kept(kept.weights, output, valid, first, start, KEPT, places)
            numbers = load_numbers(kept.columns, first, KEPT, places)
            summed += own_kept.to(tl.float32) * gather(ProductInput(x, 0), 1.0, numbers)[None, :]
        result = tl.sum(summed, 1)
    elif FORM.by_row:
        result = tl.sum(summed, 1) * row_scale
    else:
        result = tl.sum(summed, 1)
    if out.bias is not None:
        result += tl.load(out.bias + output, valid, 0.0).to(tl.float32)
    kind = out.y.dtype.element_ty
    if GATE != "":
        gate, passing = tl.split(tl.reshape(result.to(kind).to(tl.float32), [R // 2, 2]))
        opened = activation(gate, GATE).to(kind).to(tl.float32)
        at = (program // count) * (R // 2) + tl.arange(0, R // 2)
        tl.store(out.y + row * (outputs // 2) + at, (opened * passing).to(kind), at < outputs // 2)
    else:
        tl.store(out.y + row * outputs + output, result.to(kind), valid)


@dataclass(frozen=True, slots=True)
class RowsPlan:
    """Outputs per program, and its warps."""

    outputs: int
    warps: int


def plan_for(weight: WordWeight, rows: int) -> RowsPlan:
    """Measured on an H200 over the shapes of an 8B model (`benchmarks.gpu.quantized --sweep`). Many outputs give many
    programs, where one warp each, without barriers, is best; with few, warps share an output's words. 6-bit codes need
    the registers that more outputs would take; 16 outputs spill for every format."""
    outputs, words = rows * weight.shape[0], weight.row_words
    if weight.form.bits == 6:
        return RowsPlan(FEW_OUTPUTS, _sharing(words, 4))
    if outputs >= 1 << 14:
        return RowsPlan(OUTPUTS, 1)
    return RowsPlan(OUTPUTS, _sharing(words, 2 if outputs > 5000 and weight.form.bits == 4 else 4))


def _sharing(words: int, most: int) -> int:
    """Maximum warps with work in an output's words."""
    return next((warps for warps in (4, 2) if warps <= most and words > warps * WORDS_PER_WARP // 2), 1)


def few_rows(
    x: Tensor,
    weight: WordWeight,
    bias: Tensor | None,
    gate: str = "",
    plan: RowsPlan | None = None,
    kept: Kept | None = None,
) -> Tensor:
    """x (rows, columns), contiguous, times the weight; gated if `gate` is given. `kept`: as of `one_row`."""
    outputs, words, rows = weight.shape[0], weight.row_words, x.shape[0]
    plan = plan or plan_for(weight, rows)
    y = torch.empty(rows, outputs // 2 if gate else outputs, dtype=x.dtype, device=x.device)
    width = max(weight.form.length, min(WORDS_PER_WARP * plan.warps, power_of_two(words)))
    few_rows_kernel[(rows * cdiv(outputs, plan.outputs),)](
        ProductInput(x, x.stride(0)),
        ProductOutput(bias, y),
        weight.words,
        kept,
        0,
        rows,
        FORM=weight.form,
        GATE=gate,
        KEPT=0 if kept is None else kept.width,
        R=plan.outputs,
        W=width,
        ONCE=words <= width,
        num_warps=plan.warps,
        **overlapped(x),
    )
    return y
