"""Quantized experts for very few tokens, by integer dot products: bound by reading each chosen expert once.

A program owns a pair of token and expert (gate and up) or a token (down), and takes outputs in turns. A warp reads
whole rows, or its share of long ones: a thread has a run of adjacent words, 16 bytes, of every chunk of a row. It keeps
their activations in registers as 16-bit fixed point, with a power of two per run. The next rows load during the sums of
the current ones. No code moves between threads, and scales are loaded by the threads that use them.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from bankfull.ops.experts.triton.integer_rows import all_activations, load_whole_rows, row_sums
from bankfull.ops.experts.triton.rows import gate_values
from bankfull.ops.products.triton.quantized.layout import Form, Words
from bankfull.ops.products.triton.quantized.rows import neighbours
from bankfull.ops.triton.launch import start_next, wait_for_inputs


class IntegerTile(NamedTuple):
    """What is constant in a kernel: experts of a token, outputs that a program takes at a time, of how many warps or
    experts, words of a row that warps load at once, and how often they do."""

    per_token: int
    outputs: int
    together: int
    words: int
    chunks: int
    form: Form
    kind: str = ""
    """Activation of the gate."""


@triton.jit
def integer_gate_kernel(
    x, x_stride, chosen, gate, up, biases, hidden, outputs, TILE: tl.constexpr, OVERLAP: tl.constexpr
):
    """hidden[pair] = f(gate(x)) * up(x), R outputs at a time; WARPS adjacent ones belong to different warps."""
    start_next(OVERLAP)
    FORM: tl.constexpr = TILE.form
    KIND: tl.constexpr = TILE.kind
    R: tl.constexpr = TILE.outputs
    WARPS: tl.constexpr = TILE.together
    W: tl.constexpr = TILE.words
    CHUNKS: tl.constexpr = TILE.chunks
    # Both have as many groups, which the compiler cannot know.
    up = Words(up.codes, up.high, up.scales, up.minima, up.outer_scales, gate.outputs, gate.columns, gate.groups)
    pair = tl.program_id(0)
    run: tl.constexpr = neighbours(FORM.length)
    lanes = tl.arange(0, R)
    wait_for_inputs(OVERLAP)
    first = tl.load(chosen + pair).to(tl.int64) * outputs
    own = tl.program_id(1) * R + lanes
    opening = load_whole_rows(gate, first + own, own < outputs, FORM, CHUNKS, R, W)
    passing = load_whole_rows(up, first + own, own < outputs, FORM, CHUNKS, R, W)
    # Every warp loads all activations, as a row of its own.
    row = tl.zeros([WARPS], tl.int64) + (pair // TILE.per_token).to(tl.int64) * x_stride
    upper, lower, factors, whole = all_activations(x, row, row >= 0, gate.groups, FORM, CHUNKS, R // WARPS, WARPS, W)
    dtype: tl.constexpr = hidden.dtype.element_ty
    for tile in range(tl.program_id(1), tl.cdiv(outputs, R), tl.num_programs(1)):
        now = tile * R + lanes
        own = (tile + tl.num_programs(1)) * R + lanes
        next_opening = load_whole_rows(gate, first + own, own < outputs, FORM, CHUNKS, R, W)
        next_passing = load_whole_rows(up, first + own, own < outputs, FORM, CHUNKS, R, W)
        left = row_sums(upper, lower, factors, whole, opening, FORM, CHUNKS, R, W, run)
        right = row_sums(upper, lower, factors, whole, passing, FORM, CHUNKS, R, W, run)
        if biases[0] is not None:
            left += tl.load(biases[0] + first + now, mask=now < outputs, other=0.0).to(tl.float32)
            right += tl.load(biases[1] + first + now, mask=now < outputs, other=0.0).to(tl.float32)
        values = gate_values(left, right, KIND, dtype)
        tl.store(hidden + pair.to(tl.int64) * outputs + now, values, mask=now < outputs)
        opening = next_opening
        passing = next_passing


@triton.jit
def integer_down_kernel(
    hidden, chosen, weights, words, bias, y, outputs, columns, TILE: tl.constexpr, OVERLAP: tl.constexpr
):
    """y[token] = sum of its experts' down(hidden) * weight, in a fixed order, A outputs of B experts at a time: each
    warp has the activations of its own expert. B is at least PER_TOKEN."""
    start_next(OVERLAP)
    FORM: tl.constexpr = TILE.form
    PER_TOKEN: tl.constexpr = TILE.per_token
    A: tl.constexpr = TILE.outputs
    B: tl.constexpr = TILE.together
    W: tl.constexpr = TILE.words
    CHUNKS: tl.constexpr = TILE.chunks
    token = tl.program_id(0)
    run: tl.constexpr = neighbours(FORM.length)
    slots = tl.arange(0, B)
    lanes = tl.arange(0, A * B)
    some = tl.arange(0, A)
    slot = lanes % B
    used = slot < PER_TOKEN
    wait_for_inputs(OVERLAP)
    pair = (token * PER_TOKEN + slot).to(tl.int64)
    first = tl.load(chosen + pair, mask=used, other=0).to(tl.int64) * outputs
    own = tl.program_id(1) * A + lanes // B
    held = load_whole_rows(words, first + own, used & (own < outputs), FORM, CHUNKS, A * B, W)
    factor = tl.load(weights + pair, mask=used, other=0.0)
    rows = (token * PER_TOKEN + slots).to(tl.int64) * columns
    upper, lower, factors, whole = all_activations(hidden, rows, slots < PER_TOKEN, words.groups, FORM, CHUNKS, A, B, W)
    dtype: tl.constexpr = y.dtype.element_ty
    for tile in range(tl.program_id(1), tl.cdiv(outputs, A), tl.num_programs(1)):
        now = tile * A + lanes // B
        own = (tile + tl.num_programs(1)) * A + lanes // B
        later = load_whole_rows(words, first + own, used & (own < outputs), FORM, CHUNKS, A * B, W)
        out = row_sums(upper, lower, factors, whole, held, FORM, CHUNKS, A * B, W, run)
        if bias is not None:
            out += tl.load(bias + first + now, mask=used & (now < outputs), other=0.0).to(tl.float32)
        out = out.to(dtype).to(tl.float32) * factor
        mine = tile * A + some
        total = tl.sum(tl.reshape(out, [A, B]), 1)
        tl.store(y + token.to(tl.int64) * outputs + mine, total.to(dtype), mask=mine < outputs)
        held = later
