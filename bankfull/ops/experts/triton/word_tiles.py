"""Quantized experts for some and for many tokens, on tensor cores.

As in `experts_tiles` a program owns some outputs of an expert, and of its tokens: up to `SOME_TOKENS` all tokens of the
step, of which those are stored that chose the expert; of more tokens a block of sorted pairs. As in `quantized_tiles`
the weight is the first operand, dequantized in registers, exactly, and rounded once to the activations' dtype.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from bankfull.ops.experts.triton.rows import gate_values
from bankfull.ops.experts.triton.tiles import slots_of
from bankfull.ops.products.triton.quantized.codes import power, third_bits
from bankfull.ops.products.triton.quantized.layout import Form, Words
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


class WordTile(NamedTuple):
    """What is constant in the kernel over experts in words."""

    per_token: int
    """Experts of a token."""
    rows: int
    outputs: int
    together: int
    """Groups of an iteration."""
    even: bool
    """Whether iterations divide the groups of an output."""
    down: int
    form: Form
    kind: str = ""
    """Activation of the gate; empty: there is but one matrix."""


@triton.jit(do_not_specialize=["tokens"])
def word_experts_kernel(
    x, x_stride, chosen, order, words, up, biases, y, tokens, outputs, TILE: tl.constexpr, OVERLAP: tl.constexpr
):
    """y[pair] = f(words(x)) * up(x), or y[place] if there is an order, with a row of `x` for each token. Of one matrix
    y[pair] = words(x), with a row of `x` for each pair or place."""
    start_next(OVERLAP)
    kind: tl.constexpr = TILE.kind
    form: tl.constexpr = TILE.form
    T: tl.constexpr = TILE.together
    L: tl.constexpr = form.length
    BN: tl.constexpr = TILE.outputs
    if kind != "":
        # Both have as many groups, which the compiler cannot know.
        up = Words(up.codes, up.high, up.scales, up.minima, up.outer_scales, words.outputs, words.columns, words.groups)
    own = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.arange(0, TILE.rows)
    wait_for_inputs(OVERLAP)
    if order is not None:
        expert = tl.load(order.experts + tl.program_id(1))
        place = tl.load(order.firsts + tl.program_id(1)) + row
        used = (place < tl.load(order.ends + expert, mask=expert >= 0, other=0)) & (expert >= 0)
        pair = tl.load(order.pairs + place, mask=used, other=0)
        source = place if kind == "" else pair // TILE.per_token
        target = pair if kind == "" else place
        is_used = expert >= 0
    else:
        expert = tl.program_id(1)
        used, slot = slots_of(chosen, expert, row, tokens, TILE.per_token)
        target = row * TILE.per_token + slot
        source = target if kind == "" else row
        is_used = tl.max(used.to(tl.int32)) > 0
    if is_used:
        dtype: tl.constexpr = y.dtype.element_ty
        groups = words.groups
        # Outputs past the end wrap around and are dropped at the end, so that their loads need no mask.
        weight_row = expert.to(tl.int64) * outputs + own % outputs
        column = own_columns(T, form)
        at = x + source[None, :].to(tl.int64) * (words.columns if kind == "" else x_stride) + column[:, None]
        total = tl.full((BN, TILE.rows), 0.0, tl.float32)
        other = tl.full((BN, TILE.rows), 0.0, tl.float32)
        # Loaded one iteration ahead: these loads are too small for Triton's pipelining.
        group = tl.arange(0, T)
        factor, shift = group_scales(words, weight_row[:, None], group, form, TILE.down)
        if kind != "":
            up_factor, up_shift = group_scales(up, weight_row[:, None], group, form, TILE.down)
        for first in range(0, groups, T):
            codes, upper = load_codes(words, weight_row, first, form, TILE.even, BN, T)
            if kind != "":
                up_codes, up_upper = load_codes(up, weight_row, first, form, TILE.even, BN, T)
            now_factor, now_shift = per_word(factor, BN, T, L), per_word(shift, BN, T, L)
            if kind != "":
                other_factor, other_shift = per_word(up_factor, BN, T, L), per_word(up_shift, BN, T, L)
            group += T
            factor, shift = group_scales(words, weight_row[:, None], group, form, TILE.down)
            if kind != "":
                up_factor, up_shift = group_scales(up, weight_row[:, None], group, form, TILE.down)
            for i in tl.static_range(form.group // L // 2):
                near = used[None, :]
                if not TILE.even:
                    near = near & (first * form.group + column < groups * form.group)[:, None]
                lines = tl.load(at + first * form.group + i * 2 * L, near, 0.0)
                part = pair_of_weights(codes, upper, now_factor, now_shift, i, form, TILE.down, dtype)
                total = tl.dot(part, lines, total, input_precision="ieee")
                if kind != "":
                    part = pair_of_weights(up_codes, up_upper, other_factor, other_shift, i, form, TILE.down, dtype)
                    other = tl.dot(part, lines, other, input_precision="ieee")
        exist = own < outputs
        total = summed(total, biases[0], weight_row, TILE.down)
        if kind != "":
            total = gate_values(total, summed(other, biases[1], weight_row, TILE.down), kind, dtype)
        places = y + target[None, :].to(tl.int64) * outputs + own[:, None]
        tl.store(places, total.to(dtype), mask=exist[:, None] & used[None, :])


@triton.jit
def summed(sums, bias, row, DOWN: tl.constexpr):
    sums = sums * power(DOWN)
    if bias is not None:
        sums += tl.load(bias + row).to(tl.float32)[:, None]
    return sums
