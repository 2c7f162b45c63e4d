"""Quantized weights times very few rows: all that it costs is to read the weights once.

A program owns a few outputs and walks along their columns. A thread holds four neighbouring words of each output: one
16-byte load, 32 codes of 4 bits. Activations are loaded once for all outputs of a program. What limits the speed, next
to memory, is how many instructions a code takes: a shift for two codes of a byte, a bit operation and a multiplication;
steps are applied once for each word. So 4-bit codes stay below what memory delivers, on a device with 20 bytes for each
cycle and multiprocessor.

The arithmetic is float32. Products are summed with codes that are a number between one and two, and the sum of the
activations is taken off again: with 16-bit activations that costs no more than rounding their results does. Activations
in float32 pay one more instruction for exact codes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.triton.launch import overlapped, power_of_two, start_next, wait_for_inputs
from bankfull.ops.triton.pointwise import activation
from bankfull.ops.triton.quantized_codes import fraction, group_step, unit
from bankfull.ops.triton.quantized_layout import WordWeight

OUTPUTS = 4
"""Of a program: enough to share its activations, few enough for eight programs on a multiprocessor."""
WORDS_PER_WARP = 128
"""Of one output at a time: 16 bytes for each thread."""


@triton.jit
def loaded(
    words, high, steps, lows, outer_steps, outer_lows, outputs, valid, first_group, groups,
    BITS: tl.constexpr, NESTED: tl.constexpr, LOWS: tl.constexpr, BY_ROW: tl.constexpr, GROUP: tl.constexpr,
    G: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Words [outputs, G, L], their upper bits, and steps and lows [outputs, G], of G groups from `first_group` on."""
    group = first_group + tl.arange(0, G)
    there = group < groups
    base = outputs.to(tl.int64) * groups
    at = (base[:, None] + group[None, :])[:, :, None] * L + tl.arange(0, L)[None, None, :]
    inside = (valid[:, None] & there[None, :])[:, :, None]
    codes = tl.load(words + at, inside, 0).to(tl.uint32, bitcast=True)
    upper = codes
    if BITS == 6:
        upper = tl.load(high + at, inside, 0).to(tl.uint16, bitcast=True).to(tl.uint32)
    step = tl.zeros([1, 1], dtype=tl.float32)
    low = step
    if not BY_ROW:
        of_group = base[:, None] + group[None, :]
        # Outer steps cover 256 columns.
        outer = outputs.to(tl.int64)[:, None] * (groups // (256 // GROUP)) + (group // (256 // GROUP))[None, :]
        known = valid[:, None] & there[None, :]
        step = group_step(steps, outer_steps, of_group, outer, known, NESTED)
        if LOWS != 0:
            low = LOWS * group_step(lows, outer_lows, of_group, outer, known, NESTED)
    return codes, upper, step, low


@triton.jit
def products(
    x, codes, upper, step, low, first_group, groups, columns,
    BITS: tl.constexpr, ZERO: tl.constexpr, FLOATS: tl.constexpr, LOWS: tl.constexpr, BY_ROW: tl.constexpr,
    GROUP: tl.constexpr, PADDED: tl.constexpr, WIDE: tl.constexpr, G: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Of each word with its activations, summed: [outputs, G, L]."""
    group = first_group + tl.arange(0, G)
    place = group[:, None] * GROUP + tl.arange(0, L)[None, :]
    inside = (group < groups)[:, None]
    summed = tl.zeros(codes.shape, dtype=tl.float32)
    taken = tl.zeros([G, L], dtype=tl.float32)
    whole = tl.zeros([G, L], dtype=tl.float32)
    for j in tl.static_range(GROUP // L):
        size: tl.constexpr = unit(j, BITS, FLOATS)
        if PADDED:
            inside = (group < groups)[:, None] & (place + j * L < columns)
        numbers = tl.load(x + place + j * L, inside, 0.0).to(tl.float32)
        code = fraction(codes, upper, j, BITS, FLOATS)
        if WIDE and not FLOATS:
            code = code - (1.0 + ZERO / size)
        elif not FLOATS:
            taken += numbers * (size + ZERO)
        summed += (numbers * size)[None, :, :] * code
        if LOWS != 0:
            whole += numbers
    if not WIDE and not FLOATS:
        summed -= taken[None, :, :]
    if not BY_ROW:
        summed = summed * step[:, :, None]
        if LOWS != 0:
            summed += low[:, :, None] * whole[None, :, :]
    return summed


@triton.jit
def few_rows_kernel(
    x, bias, y, words, high, steps, lows, outer_steps, outer_lows, rows, outputs, columns, groups, x_stride,
    BITS: tl.constexpr, ZERO: tl.constexpr, FLOATS: tl.constexpr, NESTED: tl.constexpr, LOWS: tl.constexpr,
    BY_ROW: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, HAS_BIAS: tl.constexpr, WIDE: tl.constexpr,
    GATE: tl.constexpr, R: tl.constexpr, G: tl.constexpr, L: tl.constexpr, ONCE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """With GATE, the name of an activation, a program's outputs are pairs of a gate and what passes it."""
    start_next(OVERLAP)
    program = tl.program_id(0)
    row = (program % rows).to(tl.int64)
    lanes = tl.arange(0, R)
    if GATE != "":
        pair = (program // rows) * (R // 2) + lanes // 2
        valid = pair < outputs // 2
        output = pair + (lanes % 2) * (outputs // 2)
    else:
        output = (program // rows) * R + lanes
        valid = output < outputs
    x += row * x_stride

    # What never changes is under way before the activations are there.
    codes, upper, step, low = loaded(
        words, high, steps, lows, outer_steps, outer_lows, output, valid, 0, groups, BITS, NESTED, LOWS, BY_ROW, GROUP,
        G, L,
    )
    if BY_ROW:
        of_row = tl.load(steps + output, valid, 0.0)
    if HAS_BIAS:
        shift = tl.load(bias + output, valid, 0.0).to(tl.float32)
    wait_for_inputs(OVERLAP)
    if ONCE:
        summed = products(
            x, codes, upper, step, low, 0, groups, columns, BITS, ZERO, FLOATS, LOWS, BY_ROW, GROUP, PADDED, WIDE, G, L
        )
    else:
        summed = tl.zeros([R, G, L], dtype=tl.float32)
        for first in range(0, groups, G):
            now_codes, now_upper, now_step, now_low = codes, upper, step, low
            codes, upper, step, low = loaded(
                words, high, steps, lows, outer_steps, outer_lows, output, valid, first + G, groups, BITS, NESTED, LOWS,
                BY_ROW, GROUP, G, L,
            )
            summed += products(
                x, now_codes, now_upper, now_step, now_low, first, groups, columns, BITS, ZERO, FLOATS, LOWS, BY_ROW,
                GROUP, PADDED, WIDE, G, L,
            )
    result = tl.sum(tl.reshape(summed, [R, G * L]), 1)
    if BY_ROW:
        result = result * of_row
    if HAS_BIAS:
        result += shift
    kind = y.dtype.element_ty
    if GATE != "":
        gate, passing = tl.split(tl.reshape(result.to(kind).to(tl.float32), [R // 2, 2]))
        opened = activation(gate, GATE).to(kind).to(tl.float32)
        at = (program // rows) * (R // 2) + tl.arange(0, R // 2)
        tl.store(y + row * (outputs // 2) + at, (opened * passing).to(kind), at < outputs // 2)
    else:
        tl.store(y + row * outputs + output, result.to(kind), valid)


def few_rows(x: Tensor, weight: WordWeight, bias: Tensor | None, gate: str = "") -> Tensor:
    """x (rows, columns), side by side, times the weight; with `gate`, gated."""
    outputs, columns = weight.shape
    rows = x.shape[0]
    y = torch.empty(rows, outputs // 2 if gate else outputs, dtype=x.dtype, device=x.device)
    length = weight.group // weight.form.per_word
    warps = _warps(weight.groups * length)
    groups = max(1, min(WORDS_PER_WARP * warps // length, power_of_two(weight.groups)))
    programs = rows * triton.cdiv(outputs, OUTPUTS)
    few_rows_kernel[(programs,)](
        x, x if bias is None else bias, y, *weight.tensors(), rows, outputs, columns, weight.groups, x.stride(0),
        **weight.constants(), HAS_BIAS=bias is not None, WIDE=x.dtype == torch.float32, GATE=gate,
        R=OUTPUTS, G=groups, L=length, ONCE=weight.groups <= groups, num_warps=warps, **overlapped(x),
    )  # fmt: skip
    return y


def _warps(words: int) -> int:
    """The most, up to four, that cut an output's words into whole parts; else the most that have something to do."""
    for warps in (4, 2, 1):
        if words % (warps * WORDS_PER_WARP) == 0:
            return warps
    return next((warps for warps in (4, 2) if words > warps * WORDS_PER_WARP // 2), 1)
