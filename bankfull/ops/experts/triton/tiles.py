"""Experts for some and for many tokens, on tensor cores.

Some tokens (up to `SOME_TOKENS`): a program owns an expert and some outputs, and multiplies all tokens of the step. It
stores those that chose the expert. Nothing is sorted, each touched expert is read once, and the surplus products are
cheaper than the weights. The weight is the first operand: tensor cores need 64 rows there.

Many tokens: pairs of token and expert are sorted by expert, and a program owns up to ROWS pairs of one expert and some
outputs. Programs of the same pairs are adjacent, so that L2 holds their rows and the weights of a few experts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bankfull.ops.experts.triton.rows import gate_values
from bankfull.ops.experts.triton.weights import output_scale, weight_tile
from bankfull.ops.triton.launch import start_next, wait_for_inputs


@triton.jit
def slots_of(chosen, expert, token, tokens, PER_TOKEN: tl.constexpr, SLOTS: tl.constexpr):
    """Whether each token chose the expert, and in which slot."""
    slot = tl.arange(0, SLOTS)
    inside = (token < tokens)[:, None] & (slot < PER_TOKEN)[None, :]
    mine = tl.load(chosen + token[:, None] * PER_TOKEN + slot[None, :], mask=inside, other=-1) == expert
    return tl.max(mine.to(tl.int32), 1) > 0, tl.sum(tl.where(mine, slot[None, :], 0), 1)


@triton.jit(do_not_specialize=["tokens"])
def some_gate_kernel(
    x,
    x_stride,
    chosen,
    gate,
    gate_scales,
    up,
    up_scales,
    gate_bias,
    up_bias,
    hidden,
    tokens,
    outputs,
    columns,
    PER_TOKEN: tl.constexpr,
    SLOTS: tl.constexpr,
    TOKENS: tl.constexpr,
    OUT: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    KIND: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    start_next(OVERLAP)
    expert = tl.program_id(1).to(tl.int64)
    own = tl.program_id(0) * OUT + tl.arange(0, OUT)
    token = tl.arange(0, TOKENS)
    column = tl.arange(0, DEPTH)
    exist = own < outputs
    wait_for_inputs(OVERLAP)
    used, slot = slots_of(chosen, expert, token, tokens, PER_TOKEN, SLOTS)
    if tl.max(used.to(tl.int32)) > 0:
        dtype: tl.constexpr = hidden.dtype.element_ty
        row = expert * outputs + own
        opened = tl.zeros((OUT, TOKENS), tl.float32)
        other = tl.zeros((OUT, TOKENS), tl.float32)
        for at in tl.range(0, columns, DEPTH, num_stages=STAGES):
            here = at + column
            inside = here < columns
            both = exist[:, None] & inside[None, :]
            lines = tl.load(
                x + token[None, :].to(tl.int64) * x_stride + here[:, None],
                mask=used[None, :] & inside[:, None],
                other=0.0,
            )
            first = weight_tile(gate, gate_scales, row[:, None], here[None, :], columns, both, FORM, GROUP, dtype)
            second = weight_tile(up, up_scales, row[:, None], here[None, :], columns, both, FORM, GROUP, dtype)
            opened = tl.dot(first, lines, opened, input_precision="ieee")
            other = tl.dot(second, lines, other, input_precision="ieee")
        left = opened * output_scale(gate_scales, row, exist, FORM)[:, None]
        right = other * output_scale(up_scales, row, exist, FORM)[:, None]
        if BIAS:
            left += tl.load(gate_bias + row, mask=exist, other=0.0).to(tl.float32)[:, None]
            right += tl.load(up_bias + row, mask=exist, other=0.0).to(tl.float32)[:, None]
        pair = (token * PER_TOKEN + slot)[None, :].to(tl.int64)
        values = gate_values(left, right, KIND, dtype).to(dtype)
        tl.store(hidden + pair * outputs + own[:, None], values, mask=exist[:, None] & used[None, :])


@triton.jit(do_not_specialize=["tokens"])
def some_down_kernel(
    hidden,
    chosen,
    down,
    down_scales,
    down_bias,
    out,
    tokens,
    outputs,
    columns,
    PER_TOKEN: tl.constexpr,
    SLOTS: tl.constexpr,
    TOKENS: tl.constexpr,
    OUT: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out[pair] = down(hidden[pair])."""
    start_next(OVERLAP)
    expert = tl.program_id(1).to(tl.int64)
    own = tl.program_id(0) * OUT + tl.arange(0, OUT)
    token = tl.arange(0, TOKENS)
    column = tl.arange(0, DEPTH)
    exist = own < outputs
    wait_for_inputs(OVERLAP)
    used, slot = slots_of(chosen, expert, token, tokens, PER_TOKEN, SLOTS)
    if tl.max(used.to(tl.int32)) > 0:
        dtype: tl.constexpr = hidden.dtype.element_ty
        row = expert * outputs + own
        pair = (token * PER_TOKEN + slot)[None, :].to(tl.int64)
        total = tl.zeros((OUT, TOKENS), tl.float32)
        for at in tl.range(0, columns, DEPTH, num_stages=STAGES):
            here = at + column
            inside = here < columns
            both = exist[:, None] & inside[None, :]
            lines = tl.load(hidden + pair * columns + here[:, None], mask=used[None, :] & inside[:, None], other=0.0)
            part = weight_tile(down, down_scales, row[:, None], here[None, :], columns, both, FORM, GROUP, dtype)
            total = tl.dot(part, lines, total, input_precision="ieee")
        total = total * output_scale(down_scales, row, exist, FORM)[:, None]
        if BIAS:
            total += tl.load(down_bias + row, mask=exist, other=0.0).to(tl.float32)[:, None]
        tl.store(out + pair * outputs + own[:, None], total.to(dtype), mask=exist[:, None] & used[None, :])


@triton.jit
def sum_kernel(out, weights, y, columns, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """y[token] = sum of out[pair] * weight over the token's pairs, in their order."""
    start_next(OVERLAP)
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exist = column < columns
    wait_for_inputs(OVERLAP)
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(PER_TOKEN):
        pair = token * PER_TOKEN + slot
        part = tl.load(out + pair.to(tl.int64) * columns + column, mask=exist, other=0.0).to(tl.float32)
        total += part * tl.load(weights + pair)
    tl.store(y + token.to(tl.int64) * columns + column, total.to(y.dtype.element_ty), mask=exist)


@triton.jit(do_not_specialize=["pairs"])
def blocks_kernel(
    ends,
    block_expert,
    block_first,
    pairs,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Blocks of up to ROWS sorted pairs of one expert. `ends`: where each expert's pairs end. Blocks that do not exist
    keep the expert -1, which the caller has stored."""
    start_next(OVERLAP)
    expert = tl.arange(0, WIDTH)
    exist = expert < EXPERTS
    wait_for_inputs(OVERLAP)
    end = tl.load(ends + expert, mask=exist, other=0)
    begin = tl.load(ends + expert - 1, mask=exist & (expert > 0), other=0)
    blocks = tl.where(exist, (end - begin + ROWS - 1) // ROWS, 0)
    place = tl.cumsum(blocks) - blocks
    for i in range(tl.max(blocks)):
        here = exist & (i < blocks)
        tl.store(block_expert + place + i, expert, mask=here)
        tl.store(block_first + place + i, begin + i * ROWS, mask=here)


@triton.jit
def many_gate_kernel(
    x,
    x_stride,
    order,
    ends,
    block_expert,
    block_first,
    gate,
    gate_scales,
    up,
    up_scales,
    gate_bias,
    up_bias,
    hidden,
    outputs,
    columns,
    PER_TOKEN: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    KIND: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """hidden[place] = f(gate(x)) * up(x) for sorted pairs; `order`: place -> pair."""
    start_next(OVERLAP)
    tiles = tl.cdiv(outputs, OUT)
    block = tl.program_id(0) // tiles
    own = (tl.program_id(0) % tiles) * OUT + tl.arange(0, OUT)
    column = tl.arange(0, DEPTH)
    exist = own < outputs
    wait_for_inputs(OVERLAP)
    expert = tl.load(block_expert + block)
    if expert >= 0:
        dtype: tl.constexpr = hidden.dtype.element_ty
        place = tl.load(block_first + block) + tl.arange(0, ROWS)
        used = place < tl.load(ends + expert)
        token = tl.load(order + place, mask=used, other=0) // PER_TOKEN
        source = x + token.to(tl.int64)[:, None] * x_stride
        row = expert.to(tl.int64) * outputs + own
        opened = tl.zeros((ROWS, OUT), tl.float32)
        other = tl.zeros((ROWS, OUT), tl.float32)
        for at in tl.range(0, columns, DEPTH, num_stages=STAGES):
            here = at + column
            inside = here < columns
            both = exist[None, :] & inside[:, None]
            lines = tl.load(source + here[None, :], mask=used[:, None] & inside[None, :], other=0.0)
            first = weight_tile(gate, gate_scales, row[None, :], here[:, None], columns, both, FORM, GROUP, dtype)
            second = weight_tile(up, up_scales, row[None, :], here[:, None], columns, both, FORM, GROUP, dtype)
            opened = tl.dot(lines, first, opened, input_precision="ieee")
            other = tl.dot(lines, second, other, input_precision="ieee")
        left = opened * output_scale(gate_scales, row, exist, FORM)[None, :]
        right = other * output_scale(up_scales, row, exist, FORM)[None, :]
        if BIAS:
            left += tl.load(gate_bias + row, mask=exist, other=0.0).to(tl.float32)[None, :]
            right += tl.load(up_bias + row, mask=exist, other=0.0).to(tl.float32)[None, :]
        values = gate_values(left, right, KIND, dtype).to(dtype)
        places = hidden + place.to(tl.int64)[:, None] * outputs + own[None, :]
        tl.store(places, values, mask=used[:, None] & exist[None, :])


@triton.jit
def many_down_kernel(
    hidden,
    order,
    ends,
    block_expert,
    block_first,
    down,
    down_scales,
    down_bias,
    out,
    outputs,
    columns,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out[pair] = down(hidden[place]): results return to the order of tokens."""
    start_next(OVERLAP)
    tiles = tl.cdiv(outputs, OUT)
    block = tl.program_id(0) // tiles
    own = (tl.program_id(0) % tiles) * OUT + tl.arange(0, OUT)
    column = tl.arange(0, DEPTH)
    exist = own < outputs
    wait_for_inputs(OVERLAP)
    expert = tl.load(block_expert + block)
    if expert >= 0:
        dtype: tl.constexpr = hidden.dtype.element_ty
        place = tl.load(block_first + block) + tl.arange(0, ROWS)
        used = place < tl.load(ends + expert)
        source = hidden + place.to(tl.int64)[:, None] * columns
        row = expert.to(tl.int64) * outputs + own
        total = tl.zeros((ROWS, OUT), tl.float32)
        for at in tl.range(0, columns, DEPTH, num_stages=STAGES):
            here = at + column
            inside = here < columns
            both = exist[None, :] & inside[:, None]
            lines = tl.load(source + here[None, :], mask=used[:, None] & inside[None, :], other=0.0)
            part = weight_tile(down, down_scales, row[None, :], here[:, None], columns, both, FORM, GROUP, dtype)
            total = tl.dot(lines, part, total, input_precision="ieee")
        total = total * output_scale(down_scales, row, exist, FORM)[None, :]
        if BIAS:
            total += tl.load(down_bias + row, mask=exist, other=0.0).to(tl.float32)[None, :]
        pair = tl.load(order + place, mask=used, other=0)
        places = out + pair.to(tl.int64)[:, None] * outputs + own[None, :]
        tl.store(places, total.to(dtype), mask=used[:, None] & exist[None, :])
