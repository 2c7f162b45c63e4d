"""Quantized experts for some and for many tokens, on tensor cores.

As in `experts_tiles` a program owns some outputs of an expert, and of its tokens: up to `SOME_TOKENS` all tokens of the
step, of which those are stored that chose the expert; of more tokens a block of sorted pairs. As in `quantized_tiles`
the weight is the first operand, dequantized in registers, exactly, and rounded once to the activations' dtype.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bankfull.ops.experts.triton.rows import gate_values
from bankfull.ops.experts.triton.tiles import slots_of
from bankfull.ops.products.triton.quantized.codes import power, third_bits
from bankfull.ops.products.triton.quantized.layout import Words
from bankfull.ops.products.triton.quantized.tiles import group_scales, pair_of_weights, per_word
from bankfull.ops.triton.launch import start_next, wait_for_inputs


@triton.jit
def load_codes(words, row, first, FORM: tl.constexpr, EVEN: tl.constexpr, BN: tl.constexpr, T: tl.constexpr):
    """Words of T groups from `first` on, and the upper bits of their codes. EVEN: T divides the groups of an output;
    else what is past the end is zero."""
    L: tl.constexpr = FORM.length
    groups = words.groups
    word = tl.arange(0, T * L)
    at = words.codes + row[:, None] * (groups * L) + first * L + word[None, :]
    codes = tl.load(at) if EVEN else tl.load(at, (word < (groups - first) * L)[None, :], 0)
    codes = codes.to(tl.uint32, bitcast=True)
    upper = codes
    if FORM.bits == 6:
        at = words.high + row[:, None] * (groups * L) + first * L + word[None, :]
        upper = tl.load(at) if EVEN else tl.load(at, (word < (groups - first) * L)[None, :], 0)
        upper = upper.to(tl.uint16, bitcast=True).to(tl.uint32)
    elif FORM.bits == 3:
        two = tl.arange(0, T * L // 2)
        at = words.high + row[:, None] * (groups * L // 2) + first * L // 2 + two[None, :]
        upper = tl.load(at) if EVEN else tl.load(at, (two < (groups - first) * L // 2)[None, :], 0)
        upper = third_bits(upper, BN, T * L)
    return codes, upper


@triton.jit
def own_columns(T: tl.constexpr, FORM: tl.constexpr):
    """Columns of codes 0 of T groups; those of codes i are 2 L i higher."""
    L: tl.constexpr = FORM.length
    behind = tl.arange(0, 2 * T * L)
    return behind // (2 * L) * FORM.group + behind % (2 * L)


@triton.jit(do_not_specialize=["tokens"])
def word_gate_kernel(
    x,
    x_stride,
    chosen,
    order,
    ends,
    block_expert,
    block_first,
    gate,
    up,
    gate_bias,
    up_bias,
    hidden,
    tokens,
    outputs,
    PER_TOKEN: tl.constexpr,
    MANY: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    T: tl.constexpr,
    EVEN: tl.constexpr,
    DOWN: tl.constexpr,
    FORM: tl.constexpr,
    BIAS: tl.constexpr,
    KIND: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """hidden = f(gate(x)) * up(x): of each pair, or with MANY of each place among the sorted pairs."""
    start_next(OVERLAP)
    # Both have as many groups, which the compiler cannot know.
    up = Words(up.codes, up.high, up.scales, up.minima, up.outer_scales, gate.outputs, gate.columns, gate.groups)
    own = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.arange(0, BM)
    wait_for_inputs(OVERLAP)
    if MANY:
        expert = tl.load(block_expert + tl.program_id(1))
        place = tl.load(block_first + tl.program_id(1)) + row
        used = (place < tl.load(ends + expert, mask=expert >= 0, other=0)) & (expert >= 0)
        source = tl.load(order + place, mask=used, other=0) // PER_TOKEN
        target = place
        is_used = expert >= 0
    else:
        expert = tl.program_id(1)
        used, slot = slots_of(chosen, expert, row, tokens, PER_TOKEN)
        source = row
        target = row * PER_TOKEN + slot
        is_used = tl.max(used.to(tl.int32)) > 0
    if is_used:
        dtype: tl.constexpr = hidden.dtype.element_ty
        L: tl.constexpr = FORM.length
        groups = gate.groups
        first_row = expert.to(tl.int64) * outputs
        # Outputs past the end wrap around and are dropped at the end, so that their loads need no mask.
        weight_row = first_row + own % outputs
        column = own_columns(T, FORM)
        at = x + source[None, :].to(tl.int64) * x_stride + column[:, None]
        opened = tl.zeros((BN, BM), tl.float32)
        other = tl.zeros((BN, BM), tl.float32)
        # Loaded one iteration ahead: these loads are too small for Triton's pipelining.
        group = tl.arange(0, T)
        factor, shift = group_scales(gate, weight_row[:, None], group, FORM, DOWN)
        up_factor, up_shift = group_scales(up, weight_row[:, None], group, FORM, DOWN)
        for first in range(0, groups, T):
            codes, upper = load_codes(gate, weight_row, first, FORM, EVEN, BN, T)
            up_codes, up_upper = load_codes(up, weight_row, first, FORM, EVEN, BN, T)
            gate_factor, gate_shift = per_word(factor, BN, T, L), per_word(shift, BN, T, L)
            other_factor, other_shift = per_word(up_factor, BN, T, L), per_word(up_shift, BN, T, L)
            group += T
            factor, shift = group_scales(gate, weight_row[:, None], group, FORM, DOWN)
            up_factor, up_shift = group_scales(up, weight_row[:, None], group, FORM, DOWN)
            for i in tl.static_range(FORM.group // L // 2):
                near = used[None, :]
                if not EVEN:
                    near = near & (first * FORM.group + column < groups * FORM.group)[:, None]
                lines = tl.load(at + first * FORM.group + i * 2 * L, near, 0.0)
                part = pair_of_weights(codes, upper, gate_factor, gate_shift, i, FORM, DOWN, dtype)
                opened = tl.dot(part, lines, opened, input_precision="ieee")
                part = pair_of_weights(up_codes, up_upper, other_factor, other_shift, i, FORM, DOWN, dtype)
                other = tl.dot(part, lines, other, input_precision="ieee")
        exist = own < outputs
        left = opened * power(DOWN)
        right = other * power(DOWN)
        if BIAS:
            left += tl.load(gate_bias + weight_row).to(tl.float32)[:, None]
            right += tl.load(up_bias + weight_row).to(tl.float32)[:, None]
        values = gate_values(left, right, KIND, dtype)
        places = hidden + target[None, :].to(tl.int64) * outputs + own[:, None]
        tl.store(places, values, mask=exist[:, None] & used[None, :])


@triton.jit(do_not_specialize=["tokens"])
def word_down_kernel(
    hidden,
    chosen,
    order,
    ends,
    block_expert,
    block_first,
    words,
    bias,
    out,
    tokens,
    outputs,
    columns,
    PER_TOKEN: tl.constexpr,
    MANY: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    T: tl.constexpr,
    EVEN: tl.constexpr,
    DOWN: tl.constexpr,
    FORM: tl.constexpr,
    BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out[pair] = down(hidden): rows of `hidden` belong to pairs, or with MANY to places among the sorted pairs."""
    start_next(OVERLAP)
    own = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.arange(0, BM)
    wait_for_inputs(OVERLAP)
    if MANY:
        expert = tl.load(block_expert + tl.program_id(1))
        place = tl.load(block_first + tl.program_id(1)) + row
        used = (place < tl.load(ends + expert, mask=expert >= 0, other=0)) & (expert >= 0)
        source = place
        target = tl.load(order + place, mask=used, other=0)
        is_used = expert >= 0
    else:
        expert = tl.program_id(1)
        used, slot = slots_of(chosen, expert, row, tokens, PER_TOKEN)
        source = row * PER_TOKEN + slot
        target = source
        is_used = tl.max(used.to(tl.int32)) > 0
    if is_used:
        dtype: tl.constexpr = hidden.dtype.element_ty
        L: tl.constexpr = FORM.length
        groups = words.groups
        weight_row = expert.to(tl.int64) * outputs + own % outputs
        column = own_columns(T, FORM)
        at = hidden + source[None, :].to(tl.int64) * columns + column[:, None]
        total = tl.zeros((BN, BM), tl.float32)
        group = tl.arange(0, T)
        factor, shift = group_scales(words, weight_row[:, None], group, FORM, DOWN)
        for first in range(0, groups, T):
            codes, upper = load_codes(words, weight_row, first, FORM, EVEN, BN, T)
            now_factor, now_shift = per_word(factor, BN, T, L), per_word(shift, BN, T, L)
            group += T
            factor, shift = group_scales(words, weight_row[:, None], group, FORM, DOWN)
            for i in tl.static_range(FORM.group // L // 2):
                near = used[None, :]
                if not EVEN:
                    near = near & (first * FORM.group + column < groups * FORM.group)[:, None]
                lines = tl.load(at + first * FORM.group + i * 2 * L, near, 0.0)
                part = pair_of_weights(codes, upper, now_factor, now_shift, i, FORM, DOWN, dtype)
                total = tl.dot(part, lines, total, input_precision="ieee")
        exist = own < outputs
        total = total * power(DOWN)
        if BIAS:
            total += tl.load(bias + weight_row).to(tl.float32)[:, None]
        places = out + target[None, :].to(tl.int64) * outputs + own[:, None]
        tl.store(places, total.to(dtype), mask=exist[:, None] & used[None, :])
