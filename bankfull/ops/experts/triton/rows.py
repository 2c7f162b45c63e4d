"""Experts for very few tokens: one program per pair of token and expert, and some outputs. Nothing is sorted. Tokens
with the same expert read it again, mostly from L2."""

from __future__ import annotations

import triton
import triton.language as tl

from bankfull.ops.experts.triton.weights import finished, weight_tile
from bankfull.ops.pointwise.triton import activation
from bankfull.ops.triton.launch import start_next, wait_for_inputs


@triton.jit
def gate_values(gate, up, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """f(gate) * up in DTYPE, with both rounded to it first as the reference does."""
    gate, up = gate.to(DTYPE).to(tl.float32), up.to(DTYPE).to(tl.float32)
    if KIND == "clamped_swiglu":
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        result = (up + 1.0) * (gate / (1.0 + tl.exp(-1.702 * gate)))
    else:
        result = activation(gate, KIND).to(DTYPE).to(tl.float32) * up
    return result.to(DTYPE)


@triton.jit
def pair_gate_kernel(
    x, x_stride, chosen, gate, up, hidden, outputs, columns, TILE: tl.constexpr, OVERLAP: tl.constexpr
):
    """hidden[pair] = f(gate(x)) * up(x)."""
    start_next(OVERLAP)
    pair = tl.program_id(0)
    own = tl.program_id(1) * TILE.outputs + tl.arange(0, TILE.outputs)
    column = tl.arange(0, TILE.depth)
    exist = own < outputs
    wait_for_inputs(OVERLAP)
    expert = tl.load(chosen + pair).to(tl.int64)
    row = expert * outputs + own
    source = x + (pair // TILE.per_token).to(tl.int64) * x_stride
    opened = tl.full((TILE.outputs, TILE.depth), 0.0, tl.float32)
    other = tl.full((TILE.outputs, TILE.depth), 0.0, tl.float32)
    for at in range(0, columns, TILE.depth):
        here = at + column
        inside = here < columns
        line = tl.load(source + here, mask=inside, other=0.0).to(tl.float32)[None, :]
        both = exist[:, None] & inside[None, :]
        first = weight_tile(gate, row[:, None], here[None, :], columns, both, TILE, tl.float32)
        second = weight_tile(up, row[:, None], here[None, :], columns, both, TILE, tl.float32)
        opened += first * line
        other += second * line
    left = finished(tl.sum(opened, 1), gate, row, exist, None, TILE)
    right = finished(tl.sum(other, 1), up, row, exist, None, TILE)
    kind: tl.constexpr = TILE.kind
    values = gate_values(left, right, kind, hidden.dtype.element_ty)
    tl.store(hidden + pair.to(tl.int64) * outputs + own, values, mask=exist)


@triton.jit
def pair_down_kernel(hidden, chosen, weights, down, y, outputs, columns, TILE: tl.constexpr, OVERLAP: tl.constexpr):
    """y[token] = sum of its experts' down(hidden) * weight, in a fixed order. TILE.rows experts of a token are read at
    once: one after the other, each would wait for memory again."""
    start_next(OVERLAP)
    token = tl.program_id(0)
    lane = tl.arange(0, TILE.rows * TILE.outputs)
    own = tl.program_id(1) * TILE.outputs + lane % TILE.outputs
    column = tl.arange(0, TILE.depth)
    wait_for_inputs(OVERLAP)
    dtype: tl.constexpr = y.dtype.element_ty
    whole = tl.full((TILE.outputs,), 0.0, tl.float32)
    slots: tl.constexpr = TILE.per_token
    together: tl.constexpr = TILE.rows
    for first in tl.static_range(0, slots, together):
        slot = first + lane // TILE.outputs
        used = (own < outputs) & (slot < slots)
        pair = (token * slots + slot).to(tl.int64)
        row = tl.load(chosen + pair, mask=used, other=0).to(tl.int64) * outputs + own
        source = hidden + pair * columns
        total = tl.full((together * TILE.outputs, TILE.depth), 0.0, tl.float32)
        for at in range(0, columns, TILE.depth):
            here = at + column
            both = used[:, None] & (here < columns)[None, :]
            part = weight_tile(down, row[:, None], here[None, :], columns, both, TILE, tl.float32)
            total += part * tl.load(source[:, None] + here[None, :], mask=both, other=0.0).to(tl.float32)
        out = finished(tl.sum(total, 1), down, row, used, None, TILE)
        out = out.to(dtype).to(tl.float32) * tl.load(weights + pair, mask=used, other=0.0)
        whole += tl.sum(tl.reshape(out, (together, TILE.outputs)), 0)
    mine = tl.program_id(1) * TILE.outputs + tl.arange(0, TILE.outputs)
    tl.store(y + token.to(tl.int64) * outputs + mine, whole.to(dtype), mask=mine < outputs)
