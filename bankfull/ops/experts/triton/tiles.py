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
from bankfull.ops.experts.triton.weights import finished, weight_tile
from bankfull.ops.triton.launch import start_next, wait_for_inputs


@triton.jit
def slots_of(chosen, expert, token, tokens, PER_TOKEN: tl.constexpr):
    """Whether each token chose the expert, and in which slot."""
    slot = tl.arange(0, triton.next_power_of_2(PER_TOKEN))
    inside = (token < tokens)[:, None] & (slot < PER_TOKEN)[None, :]
    mine = tl.load(chosen + token[:, None] * PER_TOKEN + slot[None, :], mask=inside, other=-1) == expert
    return tl.max(mine.to(tl.int32), 1) > 0, tl.sum(tl.where(mine, slot[None, :], 0), 1)


@triton.jit(do_not_specialize=["tokens"])
def some_experts_kernel(
    x, x_stride, chosen, weight, up, y, tokens, outputs, columns, TILE: tl.constexpr, OVERLAP: tl.constexpr
):
    """y[pair] = f(weight(x)) * up(x), with a row of `x` for each token; without `up` y[pair] = weight(x[pair])."""
    start_next(OVERLAP)
    expert = tl.program_id(1).to(tl.int64)
    own = tl.program_id(0) * TILE.outputs + tl.arange(0, TILE.outputs)
    token = tl.arange(0, TILE.rows)
    column = tl.arange(0, TILE.depth)
    exist = own < outputs
    wait_for_inputs(OVERLAP)
    used, slot = slots_of(chosen, expert, token, tokens, TILE.per_token)
    if tl.max(used.to(tl.int32)) > 0:
        dtype: tl.constexpr = y.dtype.element_ty
        kind: tl.constexpr = TILE.kind
        row = expert * outputs + own
        pair = (token * TILE.per_token + slot)[None, :].to(tl.int64)
        source = x + (pair * columns if kind == "" else token[None, :].to(tl.int64) * x_stride)
        total = tl.full((TILE.outputs, TILE.rows), 0.0, tl.float32)
        other = tl.full((TILE.outputs, TILE.rows), 0.0, tl.float32)
        for at in tl.range(0, columns, TILE.depth, num_stages=TILE.stages):
            here = at + column
            inside = here < columns
            both = exist[:, None] & inside[None, :]
            lines = tl.load(source + here[:, None], mask=used[None, :] & inside[:, None], other=0.0)
            part = weight_tile(weight, row[:, None], here[None, :], columns, both, TILE, dtype)
            if kind != "":  # both are loaded before the first product
                other_part = weight_tile(up, row[:, None], here[None, :], columns, both, TILE, dtype)
            total = tl.dot(part, lines, total, input_precision="ieee")
            if kind != "":
                other = tl.dot(other_part, lines, other, input_precision="ieee")
        total = finished(total, weight, row, exist, 1, TILE)
        if kind != "":
            total = gate_values(total, finished(other, up, row, exist, 1, TILE), kind, dtype)
        tl.store(y + pair * outputs + own[:, None], total.to(dtype), mask=exist[:, None] & used[None, :])


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


@triton.jit
def blocks_kernel(order, EXPERTS: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr):
    """Blocks of up to ROWS sorted pairs of one expert. Blocks that do not exist keep the expert -1, which the caller
    has stored."""
    start_next(OVERLAP)
    expert = tl.arange(0, triton.next_power_of_2(EXPERTS))
    exist = expert < EXPERTS
    wait_for_inputs(OVERLAP)
    end = tl.load(order.ends + expert, mask=exist, other=0)
    begin = tl.load(order.ends + expert - 1, mask=exist & (expert > 0), other=0)
    blocks = tl.where(exist, (end - begin + ROWS - 1) // ROWS, 0)
    place = tl.cumsum(blocks) - blocks
    for i in range(tl.max(blocks)):
        here = exist & (i < blocks)
        tl.store(order.experts + place + i, expert, mask=here)
        tl.store(order.firsts + place + i, begin + i * ROWS, mask=here)


@triton.jit
def many_experts_kernel(x, x_stride, order, weight, up, y, outputs, columns, TILE: tl.constexpr, OVERLAP: tl.constexpr):
    """y[place] = f(weight(x)) * up(x) for sorted pairs, with a row of `x` for each token. Without `up` y[pair] =
    weight(x[place]): results return to the order of tokens."""
    start_next(OVERLAP)
    tiles = tl.cdiv(outputs, TILE.outputs)
    block = tl.program_id(0) // tiles
    own = (tl.program_id(0) % tiles) * TILE.outputs + tl.arange(0, TILE.outputs)
    column = tl.arange(0, TILE.depth)
    exist = own < outputs
    wait_for_inputs(OVERLAP)
    expert = tl.load(order.experts + block)
    if expert >= 0:
        dtype: tl.constexpr = y.dtype.element_ty
        kind: tl.constexpr = TILE.kind
        place = tl.load(order.firsts + block) + tl.arange(0, TILE.rows)
        used = place < tl.load(order.ends + expert)
        if kind == "":
            source = x + place.to(tl.int64)[:, None] * columns
        else:
            token = tl.load(order.pairs + place, mask=used, other=0) // TILE.per_token
            source = x + token.to(tl.int64)[:, None] * x_stride
        row = expert.to(tl.int64) * outputs + own
        total = tl.full((TILE.rows, TILE.outputs), 0.0, tl.float32)
        other = tl.full((TILE.rows, TILE.outputs), 0.0, tl.float32)
        for at in tl.range(0, columns, TILE.depth, num_stages=TILE.stages):
            here = at + column
            inside = here < columns
            both = exist[None, :] & inside[:, None]
            lines = tl.load(source + here[None, :], mask=used[:, None] & inside[None, :], other=0.0)
            part = weight_tile(weight, row[None, :], here[:, None], columns, both, TILE, dtype)
            if kind != "":  # both are loaded before the first product
                other_part = weight_tile(up, row[None, :], here[:, None], columns, both, TILE, dtype)
            total = tl.dot(lines, part, total, input_precision="ieee")
            if kind != "":
                other = tl.dot(lines, other_part, other, input_precision="ieee")
        total = finished(total, weight, row, exist, 0, TILE)
        if kind == "":
            target = tl.load(order.pairs + place, mask=used, other=0)
        else:
            target = place
            total = gate_values(total, finished(other, up, row, exist, 0, TILE), kind, dtype)
        places = y + target.to(tl.int64)[:, None] * outputs + own[None, :]
        tl.store(places, total.to(dtype), mask=used[:, None] & exist[None, :])
