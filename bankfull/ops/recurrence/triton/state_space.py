"""Mamba-2's recurrence, its gated norm, and S4's recurrence over ragged batches.

A program of a recurrence handles one sequence and a block of channels, and keeps their state in registers: the state is
read once and written once per kept token. Token counts and kept states are read on the device, so they may change
between replays of a captured step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.pointwise.body import scale_columns
from bankfull.ops.pointwise.triton import activation, launch_size, place, softplus
from bankfull.ops.recurrence.s4 import diagonal_scan
from bankfull.ops.recurrence.ssd import Limits, gated_rms_norm, ssd_scan
from bankfull.ops.recurrence.ssm import RecurrentMeta
from bankfull.ops.recurrence.triton.operands import ScanInputs, SequenceStates, read_slot, span, written_slot
from bankfull.ops.triton.launch import cdiv, multiprocessors, overlapped, power_of_two, start_next, wait_for_inputs
from bankfull.ops.triton.rows import accepts, contiguous_rows, preloadable, supported

CHUNK = 64
"""Tokens of a sequence that are multiplied as matrices at once, in steps with many tokens of a sequence."""
SHORT = 16
"""Tokens up to which a sequence runs token by token in any step, so that its bits do not depend on its mates."""
MANY_ROWS, FEW_ROWS, CHUNK_ROWS = 32, 16, 32
"""Channels of a program: of many sequences, of few, and with chunks."""
LONGEST_PART = 16384
"""Columns of a part of a row that one program norms."""
LARGEST = 3.0e38
DIAGONAL_NUMBERS = 512
"""State elements per program of S4's recurrence, which is sequential over tokens: many small programs."""


class ScanTile(NamedTuple):
    """Channels of a program, elements of a channel's state, padded, tokens of a chunk (0: all one by one), and those up
    to which a sequence has no chunks."""

    rows: int
    size: int
    chunk: int
    short: int = SHORT


@triton.jit
def time_step(dt, shift, limits):
    return tl.minimum(tl.maximum(softplus(dt + shift), limits[0]), limits[1])


@triton.jit(do_not_specialize=["write_stride"])
def ssd_kernel(
    inputs,
    a,
    d,
    bias,
    states,
    y,
    write_stride,
    heads,
    size,
    n,
    per_group,
    limits,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Axis 0: heads x blocks of channels, 1: sequences. With chunks, all tokens of a long sequence but the last kept
    ones run in them, as y = (C B^T * decay) x + C h; the others one by one."""
    blocks = tl.cdiv(size, TILE.rows)
    block, sequence = tl.program_id(0), tl.program_id(1)
    head = block // blocks
    row, at = (block % blocks) * TILE.rows + tl.arange(0, TILE.rows), tl.arange(0, TILE.size)
    used, inside = row < size, (row < size)[:, None] & (at < n)[None, :]
    rate = tl.load(a + head).to(tl.float32) * 1.4426950408889634  # exp(v) = 2^(v log2 e)
    skip, shift = tl.load(d + head).to(tl.float32), tl.load(bias + head).to(tl.float32)
    # The slots' numbers and the state are from before the step's first kernel.
    first, last, kept = span(states.starts, states.kepts, sequence)
    own = (head * size + row)[:, None].to(tl.int64) * n + at[None, :]
    past = read_slot(states, sequence) * states.slot
    h = tl.load(states.at + past + own, inside, 0.0).to(tl.float32)
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    x_own, vector = head * size + row, (head // per_group) * n + at
    begin = first
    if TILE.chunk > 0:
        whole = last - first - tl.maximum(kept, 1) + 1
        if whole > TILE.short:
            begin = first + whole
        for chunk in range(first, begin, TILE.chunk):
            token = chunk + tl.arange(0, TILE.chunk)
            there = token < begin
            tokens = there[:, None]
            step = tl.load(inputs.dt + token * inputs.dt_token + head, there, 0.0).to(tl.float32)
            step = time_step(step, shift, limits)
            step = tl.where(there, step, 0.0)
            reached = tl.cumsum(step * rate, 0)
            total = tl.sum(step * rate, 0)
            xs = tl.load(inputs.x + token[:, None] * inputs.x_token + x_own[None, :], tokens & used[None, :], 0.0)
            xs = xs.to(tl.float32)
            meant = tokens & (at < n)[None, :]
            bs = tl.load(inputs.b + token[:, None] * inputs.b_token + vector[None, :], meant, 0.0).to(tl.float32)
            cs = tl.load(inputs.c + token[:, None] * inputs.c_token + vector[None, :], meant, 0.0).to(tl.float32)
            apart = reached[:, None] - reached[None, :]
            apart = tl.where(token[:, None] >= token[None, :], apart, float("-inf"))
            weight = tl.dot(cs, tl.trans(bs), input_precision="tf32") * tl.exp2(apart) * step[None, :]
            out = tl.dot(cs, tl.trans(h), input_precision="tf32") * tl.exp2(reached)[:, None]
            out += tl.dot(weight, xs, input_precision="tf32") + skip * xs
            places = y + (token[:, None] * heads + head) * size + row[None, :]
            tl.store(places, out.to(y.dtype.element_ty), tokens & used[None, :])
            enter = tl.trans(xs * (tl.exp2(total - reached) * step)[:, None])
            h = tl.exp2(total) * h + tl.dot(enter, bs, input_precision="tf32")
        if (begin > first) & (kept > 0):
            slot = written_slot(states, sequence, 0, write_stride) * states.slot
            tl.store(states.at + slot + own, h.to(states.at.dtype.element_ty), inside)
    for token in range(begin, last):
        step = time_step(tl.load(inputs.dt + token * inputs.dt_token + head).to(tl.float32), shift, limits)
        xs = tl.load(inputs.x + token * inputs.x_token + x_own, used, 0.0).to(tl.float32)
        bs = tl.load(inputs.b + token * inputs.b_token + vector, at < n, 0.0).to(tl.float32)
        cs = tl.load(inputs.c + token * inputs.c_token + vector, at < n, 0.0).to(tl.float32)
        h = tl.exp2(step * rate) * h + (step * xs)[:, None] * bs[None, :]
        out = tl.sum(h * cs[None, :], 1) + skip * xs
        tl.store(y + (token * heads + head) * size + row, out.to(y.dtype.element_ty), used)
        j = kept - (last - token)
        if j >= 0:
            slot = written_slot(states, sequence, j, write_stride) * states.slot
            tl.store(states.at + slot + own, h.to(states.at.dtype.element_ty), inside)


@ssd_scan.provider("triton", on="cuda", accepts=accepts)
def run_ssd_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    bias: Tensor,
    limits: Limits,
    state: Tensor,
    meta: RecurrentMeta,
) -> Tensor:
    if not supported(x, dt, b, c, state) or not preloadable(a, d, bias) or not state.is_contiguous():
        return ssd_scan.body(x, dt, a, b, c, d, bias, limits, state, meta)
    (_, heads, size), (groups, n), sequences = x.shape, b.shape[1:], len(meta.q_start) - 1
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not y.numel() or not sequences:
        return y
    many = sequences * heads * size >= 4 * MANY_ROWS * multiprocessors(x.device)
    # Products of chunks are TF32: they lose nothing that 16-bit activations have. Float32 models run token by token.
    chunk = CHUNK if meta.longest > SHORT and x.dtype is not torch.float32 else 0
    inner = max(power_of_two(n), 16 if chunk else 1)
    fewer = max(1, inner // 128)
    rows = (
        CHUNK_ROWS // min(fewer, 2)
        if chunk
        else max(1, min((MANY_ROWS if many else FEW_ROWS) // fewer, power_of_two(size)))
    )
    ssd_kernel[(heads * cdiv(size, rows), sequences)](
        ScanInputs.of(_tokens(x), dt, _tokens(b), _tokens(c)),
        a,
        d,
        bias,
        SequenceStates.of(state, meta),
        y,
        meta.write.stride(0),
        heads,
        size,
        n,
        heads // groups,
        (min(limits[0], LARGEST), min(limits[1], LARGEST)),
        ScanTile(rows, inner, chunk),
        num_warps=8 if chunk else 4,
        num_stages=1 if chunk else 3,
        **overlapped(x),
    )
    return y


def _tokens(x: Tensor) -> Tensor:
    """x (tokens, heads, size) with contiguous tokens; a view of a projection's columns if it is one."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


@triton.jit
def gated_rms_norm_kernel(
    x,
    x_stride,
    gate,
    gate_stride,
    weight,
    y,
    columns,
    part,
    eps,
    BEFORE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Axis 0: rows, 1: parts of a row."""
    row, within = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at, inside = tl.program_id(1) * part + within, within < part
    gain = tl.load(weight + at, inside, 0.0).to(tl.float32)
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    opened = activation(tl.load(gate + row * gate_stride + at, inside, 0.0).to(tl.float32), "silu")
    numbers = tl.load(x + row * x_stride + at, inside, 0.0).to(tl.float32)
    if not BEFORE:
        numbers *= opened
    numbers *= tl.rsqrt(tl.sum(numbers * numbers, 0) / part + eps) * gain
    if BEFORE:
        numbers *= opened
    tl.store(y + row * columns + at, numbers.to(y.dtype.element_ty), inside)


@gated_rms_norm.provider("triton", on="cuda", accepts=accepts)
def run_gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int, before: bool) -> Tensor:
    part = x.shape[-1] // groups
    if not supported(x, gate, weight) or not preloadable(weight) or x.dim() != 2 or part > LONGEST_PART:
        return gated_rms_norm.body(x, gate, weight, eps, groups, before)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, opening = contiguous_rows(x), contiguous_rows(gate)
    if y.numel():
        gated_rms_norm_kernel[(len(x), groups)](
            rows,
            rows.stride(0),
            opening,
            opening.stride(0),
            weight,
            y,
            x.shape[1],
            part,
            eps,
            BEFORE=before,
            BLOCK=power_of_two(part),
            num_warps=4 if part <= 2048 else 16,
            **overlapped(x),
        )
    return y


@triton.jit(do_not_specialize=["write_stride"])
def diagonal_kernel(
    x,
    x_stride,
    decay,
    leave,
    d,
    states,
    y,
    write_stride,
    channels,
    pairs,
    CHANNELS: tl.constexpr,
    PAIRS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Axis 0: blocks of channels, 1: sequences."""
    channel, pair = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, PAIRS)
    used = channel < channels
    inside = used[None, :] & (pair < pairs)[:, None]
    at, half = pair[:, None] * channels + channel[None, :], pairs * channels
    re, im = tl.load(decay + at, inside, 0.0).to(tl.float32), tl.load(decay + half + at, inside, 0.0).to(tl.float32)
    to_re = tl.load(leave + at, inside, 0.0).to(tl.float32)
    to_im = tl.load(leave + half + at, inside, 0.0).to(tl.float32)
    skip = tl.load(d + channel, used, 0.0).to(tl.float32)
    sequence = tl.program_id(1)
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    first, last, kept = span(states.starts, states.kepts, sequence)
    past = states.at + read_slot(states, sequence) * states.slot
    h_re = tl.load(past + at, inside, 0.0).to(tl.float32)
    h_im = tl.load(past + half + at, inside, 0.0).to(tl.float32)
    for token in range(first, last):
        xs = tl.load(x + token * x_stride + channel, used, 0.0).to(tl.float32)
        next_re = re * h_re - im * h_im + xs[None, :]
        h_im = re * h_im + im * h_re
        h_re = next_re
        out = tl.sum(to_re * h_re - to_im * h_im, 0) + skip * xs
        tl.store(y + token * channels + channel, out.to(y.dtype.element_ty), used)
        j = kept - (last - token)
        if j >= 0:
            after = states.at + written_slot(states, sequence, j, write_stride) * states.slot
            tl.store(after + at, h_re.to(states.at.dtype.element_ty), inside)
            tl.store(after + half + at, h_im.to(states.at.dtype.element_ty), inside)


@diagonal_scan.provider("triton", on="cuda", accepts=accepts)
def run_diagonal_scan(x: Tensor, decay: Tensor, out: Tensor, d: Tensor, state: Tensor, meta: RecurrentMeta) -> Tensor:
    if not supported(x, state) or not preloadable(decay, out, d) or not state.is_contiguous():
        return diagonal_scan.body(x, decay, out, d, state, meta)
    channels, pairs, sequences = x.shape[1], decay.shape[1], len(meta.q_start) - 1
    rows = contiguous_rows(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    inner = power_of_two(pairs)
    block = min(max(1, DIAGONAL_NUMBERS // inner), power_of_two(channels))
    if y.numel() and sequences:
        diagonal_kernel[(cdiv(channels, block), sequences)](
            rows,
            rows.stride(0),
            decay,
            out,
            d,
            SequenceStates.of(state, meta),
            y,
            meta.write.stride(0),
            channels,
            pairs,
            CHANNELS=block,
            PAIRS=inner,
            num_warps=4,
            **overlapped(x),
        )
    return y


@triton.jit
def scale_columns_kernel(x, factors, y, columns, x_stride, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    row, at = place(columns, BLOCK)
    inside = at < columns
    factor = tl.load(factors + at, inside, 0.0).to(tl.float32)
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    numbers = tl.load(x + row * x_stride + at, inside, 0.0).to(tl.float32)
    tl.store(y + row * columns + at, (numbers * factor).to(y.dtype.element_ty), inside)


@scale_columns.provider("triton", on="cuda", accepts=accepts)
def run_scale_columns(x: Tensor, factors: Tensor) -> Tensor:
    if not supported(x, factors) or not preloadable(factors) or x.dim() != 2 or x.dtype != factors.dtype:
        return scale_columns.body(x, factors)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = contiguous_rows(x)
    programs, launched = launch_size(rows)
    if y.numel():
        scale_columns_kernel[(programs,)](rows, factors, y, x.shape[1], rows.stride(0), **launched, **overlapped(x))
    return y
