"""Mamba's convolution and scan over ragged batches: a program handles one sequence and a block of its channels.

Token counts and kept states are read on the device, so they may change between replays of a captured step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.pointwise.triton import activation
from bankfull.ops.recurrence.ssm import RecurrentMeta, causal_conv, causal_conv_silu, selective_scan
from bankfull.ops.recurrence.triton.operands import ScanInputs, SequenceStates, read_slot, span, written_slot
from bankfull.ops.registry import Operation
from bankfull.ops.triton.launch import cdiv, multiprocessors, overlapped, power_of_two, start_next, wait_for_inputs
from bankfull.ops.triton.rows import accepts, contiguous_rows, preloadable, supported

CONV_CHANNELS, CONV_TOKENS = 128, 8
"""Tile size. A tile has one token if all sequences have few."""
MOST_PIECES = 32
"""Maximum programs that share the tokens of one sequence's convolution."""
SCAN_NUMBERS, FEW_SCAN_NUMBERS = 256, 128
"""State elements per warp. The scan is sequential over tokens, so only many small programs fill the device; one warp
each, so that no token waits at a barrier. The smaller size is for few sequences."""


class ConvolutionTile(NamedTuple):
    """Taps of a channel, whether SiLU follows, and tokens and channels of a tile."""

    width: int
    silu: bool
    tokens: int
    channels: int


@triton.jit
def past_inputs(states, past, token, channel, inside, PAST: tl.constexpr, DTYPE):
    """Inputs before the sequence's first token (token 0), rounded to the input dtype; zero from token 0 on."""
    places = states.at + past + channel * states.row + (token + PAST) * states.column
    return tl.load(places, inside & (token < 0), 0.0).to(DTYPE).to(tl.float32)


@triton.jit
def new_inputs(x, x_stride, token, first, channel, inside):
    """Inputs from token 0 on; zero before it."""
    return tl.load(x + (first + token) * x_stride + channel, inside & (token >= 0), 0.0).to(tl.float32)


@triton.jit(do_not_specialize=["write_stride"])
def causal_conv_kernel(
    x, x_stride, weight, bias, states, y, write_stride, channels, TILE: tl.constexpr, OVERLAP: tl.constexpr
):
    """Axis 0: blocks of channels, 1: sequences, 2: programs that take a sequence's tiles round-robin."""
    channel = tl.program_id(0) * TILE.channels + tl.arange(0, TILE.channels)[None, :]
    used = channel < channels
    sequence, piece = tl.program_id(1), tl.program_id(2)
    dtype: tl.constexpr = x.dtype.element_ty
    width: tl.constexpr = TILE.width
    shift = tl.full([1, TILE.channels], 0.0, tl.float32)
    if bias is not None:
        shift = tl.load(bias + channel, used, 0.0).to(tl.float32)
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    first = tl.load(states.starts + sequence).to(tl.int64)  # row offsets may exceed 32 bits
    count = tl.load(states.starts + sequence + 1) - tl.load(states.starts + sequence)
    past = read_slot(states, sequence) * states.slot
    for begin in range(piece * TILE.tokens, count, tl.num_programs(2) * TILE.tokens):
        token = begin + tl.arange(0, TILE.tokens)[:, None]
        inside = used & (token < count)
        total = tl.full([TILE.tokens, TILE.channels], 0.0, tl.float32) + shift
        for tap in tl.static_range(width):
            factor = tl.load(weight + channel * width + tap, used, 0.0).to(tl.float32)
            total += factor * new_inputs(x, x_stride, token - (width - 1 - tap), first, channel, inside)
        if begin < width - 1:  # only the first tokens need past inputs
            for tap in tl.static_range(width - 1):
                factor = tl.load(weight + channel * width + tap, used, 0.0).to(tl.float32)
                before = token - (width - 1 - tap)
                total += factor * past_inputs(states, past, before, channel, inside, width - 1, dtype)
        result = total.to(y.dtype.element_ty)
        if TILE.silu:
            result = activation(result.to(tl.float32), "silu").to(y.dtype.element_ty)
        tl.store(y + (first + token) * channels + channel, result, inside)
    if piece == 0:
        kept = tl.load(states.kepts + sequence)
        for j in range(kept):
            slot = written_slot(states, sequence, j, write_stride) * states.slot
            for place in tl.static_range(width - 1):
                token = count - (kept - 1 - j) - (width - 1) + place + tl.full([1, TILE.channels], 0, tl.int32)
                numbers = new_inputs(x, x_stride, token, first, channel, used)
                numbers += past_inputs(states, past, token, channel, used, width - 1, dtype)
                places = states.at + slot + channel * states.row + place * states.column
                tl.store(places, numbers.to(states.at.dtype.element_ty), used)


@triton.jit
def token_inputs(inputs, token, last, channel, at, used, SIZE):
    """A token's inputs of the scan; zeros after the last token."""
    channels, numbers = used & (token < last), (at < SIZE) & (token < last)
    return (
        tl.load(inputs.x + token * inputs.x_token + channel, channels, 0.0).to(tl.float32),
        tl.load(inputs.dt + token * inputs.dt_token + channel, channels, 0.0).to(tl.float32),
        tl.load(inputs.b + token * inputs.b_token + at, numbers, 0.0).to(tl.float32),
        tl.load(inputs.c + token * inputs.c_token + at, numbers, 0.0).to(tl.float32),
    )


@triton.jit(do_not_specialize=["write_stride"])
def selective_scan_kernel(
    inputs,
    a,
    d,
    states,
    y,
    write_stride,
    channels,
    size,
    rate_stride,
    rate_place_stride,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Axis 0: blocks of channels, 1: sequences. The state stays in registers; inputs are prefetched two tokens ahead,
    so that the recurrence does not wait for memory."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)[:, None]
    at = tl.arange(0, SIZE)[None, :]
    used = channel < channels
    inside = used & (at < size)
    rate = tl.load(a + channel * rate_stride + at * rate_place_stride, inside, 0.0).to(tl.float32)
    rate *= 1.4426950408889634  # exp(v) = 2^(v log2 e)
    skip = tl.load(d + channel, used, 0.0).to(tl.float32)
    sequence = tl.program_id(1)
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    first, last, kept = span(states.starts, states.kepts, sequence)
    own = channel * states.row + at * states.column
    past = read_slot(states, sequence) * states.slot
    h = tl.load(states.at + past + own, inside, 0.0).to(tl.float32)
    x0, delta0, b0, c0 = token_inputs(inputs, first, last, channel, at, used, size)
    x1, delta1, b1, c1 = token_inputs(inputs, first + 1, last, channel, at, used, size)
    for token in range(first, last):
        x2, delta2, b2, c2 = token_inputs(inputs, token + 2, last, channel, at, used, size)
        h = tl.exp2(delta0 * rate) * h + (delta0 * x0) * b0
        result = tl.sum(h * c0, 1, keep_dims=True) + skip * x0
        tl.store(y + token * channels + channel, result.to(y.dtype.element_ty), used)
        place = kept - (last - token)
        if place >= 0:
            slot = written_slot(states, sequence, place, write_stride) * states.slot
            tl.store(states.at + slot + own, h.to(states.at.dtype.element_ty), inside)
        x0, delta0, b0, c0 = x1, delta1, b1, c1
        x1, delta1, b1, c1 = x2, delta2, b2, c2


@causal_conv.provider("triton", on="cuda", accepts=accepts)
def run_causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, meta: RecurrentMeta) -> Tensor:
    return convolved(causal_conv, x, weight, bias, state, meta)


@causal_conv_silu.provider("triton", on="cuda", accepts=accepts)
def run_causal_conv_silu(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, meta: RecurrentMeta) -> Tensor:
    return convolved(causal_conv_silu, x, weight, bias, state, meta)


def convolved(
    operation: Operation, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, meta: RecurrentMeta
) -> Tensor:
    if not supported(x, weight, state) or x.dtype != weight.dtype or not preloadable(bias):
        return operation.body(x, weight, bias, state, meta)
    (tokens, channels), sequences, width = x.shape, len(meta.q_start) - 1, weight.shape[1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = min(CONV_CHANNELS, power_of_two(channels))
    longest = tokens - sequences + 1
    rows = contiguous_rows(x)
    several = CONV_TOKENS if longest > 4 else 1
    pieces = max(1, min(MOST_PIECES, cdiv(longest, several)))
    if y.numel() and sequences:
        causal_conv_kernel[(cdiv(channels, block), sequences, pieces)](
            rows,
            rows.stride(0),
            weight.contiguous(),
            bias,
            SequenceStates.of(state, meta),
            y,
            meta.write.stride(0),
            channels,
            ConvolutionTile(width, operation is causal_conv_silu, several, block),
            num_warps=4,
            **overlapped(x),
        )
    return y


@selective_scan.provider("triton", on="cuda", accepts=accepts)
def run_selective_scan(
    x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor, meta: RecurrentMeta
) -> Tensor:
    if not supported(x, delta, a, b, c, d, state) or not preloadable(d):
        return selective_scan.body(x, delta, a, b, c, d, state, meta)
    channels, size, sequences = x.shape[1], a.shape[1], len(meta.q_start) - 1
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    inner = power_of_two(size)
    few = sequences * channels * inner < 4 * SCAN_NUMBERS * multiprocessors(x.device)
    block = min(max(1, (FEW_SCAN_NUMBERS if few else SCAN_NUMBERS) // inner), power_of_two(channels))
    if y.numel() and sequences:
        inputs = ScanInputs.of(*(contiguous_rows(part) for part in (x, delta, b, c)))
        selective_scan_kernel[(cdiv(channels, block), sequences)](
            inputs,
            a,
            d,
            SequenceStates.of(state, meta),
            y,
            meta.write.stride(0),
            channels,
            size,
            *a.stride(),
            CHANNELS=block,
            SIZE=inner,
            num_warps=1,
            **overlapped(x),
        )
    return y
