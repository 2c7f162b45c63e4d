"""Experts for very few tokens: one program per pair of token and expert, and some outputs. Nothing is sorted. Tokens
with the same expert read it again, mostly from L2."""

from __future__ import annotations

import triton
import triton.language as tl

from bankfull.ops.experts.triton.weights import output_scale, weight_tile
from bankfull.ops.pointwise.triton import activation
from bankfull.ops.triton.launch import start_next, wait_for_inputs


@triton.jit
def gate_values(gate, up, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """f(gate) * up, with both rounded to DTYPE first as the reference does."""
    gate, up = gate.to(DTYPE).to(tl.float32), up.to(DTYPE).to(tl.float32)
    if KIND == "clamped_swiglu":
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        result = (up + 1.0) * (gate / (1.0 + tl.exp(-1.702 * gate)))
    else:
        result = activation(gate, KIND).to(DTYPE).to(tl.float32) * up
    return result


@triton.jit
def pair_gate_kernel(
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
    outputs,
    columns,
    PER_TOKEN: tl.constexpr,
    OUT: tl.constexpr,
    DEPTH: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    KIND: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """hidden[pair] = f(gate(x)) * up(x)."""
    start_next(OVERLAP)
    pair = tl.program_id(0)
    own = tl.program_id(1) * OUT + tl.arange(0, OUT)
    column = tl.arange(0, DEPTH)
    exist = own < outputs
    wait_for_inputs(OVERLAP)
    expert = tl.load(chosen + pair).to(tl.int64)
    row = expert * outputs + own
    source = x + (pair // PER_TOKEN).to(tl.int64) * x_stride
    opened = tl.zeros((OUT, DEPTH), tl.float32)
    other = tl.zeros((OUT, DEPTH), tl.float32)
    for at in range(0, columns, DEPTH):
        here = at + column
        inside = here < columns
        line = tl.load(source + here, mask=inside, other=0.0).to(tl.float32)[None, :]
        both = exist[:, None] & inside[None, :]
        first = weight_tile(gate, gate_scales, row[:, None], here[None, :], columns, both, FORM, GROUP, tl.float32)
        second = weight_tile(up, up_scales, row[:, None], here[None, :], columns, both, FORM, GROUP, tl.float32)
        opened += first * line
        other += second * line
    left = tl.sum(opened, 1) * output_scale(gate_scales, row, exist, FORM)
    right = tl.sum(other, 1) * output_scale(up_scales, row, exist, FORM)
    if BIAS:
        left += tl.load(gate_bias + row, mask=exist, other=0.0).to(tl.float32)
        right += tl.load(up_bias + row, mask=exist, other=0.0).to(tl.float32)
    dtype: tl.constexpr = hidden.dtype.element_ty
    tl.store(hidden + pair.to(tl.int64) * outputs + own, gate_values(left, right, KIND, dtype).to(dtype), mask=exist)


@triton.jit
def pair_down_kernel(
    hidden,
    chosen,
    weights,
    down,
    down_scales,
    down_bias,
    y,
    outputs,
    columns,
    PER_TOKEN: tl.constexpr,
    TOGETHER: tl.constexpr,
    OUT: tl.constexpr,
    DEPTH: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """y[token] = sum of its experts' down(hidden) * weight, in a fixed order. TOGETHER experts of a token are read at
    once: one after the other, each would wait for memory again."""
    start_next(OVERLAP)
    token = tl.program_id(0)
    lane = tl.arange(0, TOGETHER * OUT)
    own = tl.program_id(1) * OUT + lane % OUT
    column = tl.arange(0, DEPTH)
    wait_for_inputs(OVERLAP)
    dtype: tl.constexpr = y.dtype.element_ty
    whole = tl.zeros((OUT,), tl.float32)
    for first in tl.static_range(0, PER_TOKEN, TOGETHER):
        slot = first + lane // OUT
        used = (own < outputs) & (slot < PER_TOKEN)
        pair = (token * PER_TOKEN + slot).to(tl.int64)
        row = tl.load(chosen + pair, mask=used, other=0).to(tl.int64) * outputs + own
        source = hidden + pair * columns
        total = tl.zeros((TOGETHER * OUT, DEPTH), tl.float32)
        for at in range(0, columns, DEPTH):
            here = at + column
            both = used[:, None] & (here < columns)[None, :]
            part = weight_tile(down, down_scales, row[:, None], here[None, :], columns, both, FORM, GROUP, tl.float32)
            total += part * tl.load(source[:, None] + here[None, :], mask=both, other=0.0).to(tl.float32)
        out = tl.sum(total, 1) * output_scale(down_scales, row, used, FORM)
        if BIAS:
            out += tl.load(down_bias + row, mask=used, other=0.0).to(tl.float32)
        out = out.to(dtype).to(tl.float32) * tl.load(weights + pair, mask=used, other=0.0)
        whole += tl.sum(tl.reshape(out, (TOGETHER, OUT)), 0)
    mine = tl.program_id(1) * OUT + tl.arange(0, OUT)
    tl.store(y + token.to(tl.int64) * outputs + mine, whole.to(dtype), mask=mine < outputs)
