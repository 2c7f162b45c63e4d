"""Mamba's convolution and scan over ragged batches: a program handles one sequence and a block of its channels.

Token counts and kept states are read on the device, so they may change between replays of a captured step.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.pointwise.triton import activation
from bankfull.ops.recurrence.ssm import RecurrentMeta, causal_conv, causal_conv_silu, selective_scan
from bankfull.ops.registry import Operation
from bankfull.ops.triton.launch import multiprocessors, overlapped, power_of_two, start_next, wait_for_inputs
from bankfull.ops.triton.rows import accepts, contiguous_rows, preloadable, supported

CONV_CHANNELS, CONV_TOKENS = 128, 8
"""Tile size. A tile has one token if all sequences have few."""
MOST_PIECES = 32
"""Maximum programs that share the tokens of one sequence's convolution."""
SCAN_NUMBERS, FEW_SCAN_NUMBERS = 256, 128
"""State elements per warp. The scan is sequential over tokens, so only many small programs fill the device; one warp
each, so that no token waits at a barrier. The smaller size is for few sequences."""


@triton.jit
def past_inputs(state, token, past, channel, channel_stride, place_stride, inside, PAST: tl.constexpr, DTYPE):
    """Inputs before the sequence's first token (token 0), rounded to the input dtype; zero from token 0 on."""
    places = state + past + channel * channel_stride + (token + PAST) * place_stride
    return tl.load(places, inside & (token < 0), 0.0).to(DTYPE).to(tl.float32)


@triton.jit
def new_inputs(x, token, first, channel, x_stride, inside):
    """Inputs from token 0 on; zero before it."""
    return tl.load(x + (first + token) * x_stride + channel, inside & (token >= 0), 0.0).to(tl.float32)


@triton.jit(do_not_specialize=["write_stride"])
def causal_conv_kernel(
    x,
    weight,
    bias,
    state,
    y,
    starts,
    kepts,
    read,
    write,
    channels,
    x_stride,
    slot_stride,
    channel_stride,
    place_stride,
    write_stride,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Axis 0: blocks of channels, 1: sequences, 2: programs that take a sequence's tiles round-robin."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    used = channel < channels
    sequence, piece = tl.program_id(1), tl.program_id(2)
    dtype: tl.constexpr = x.dtype.element_ty
    shift = tl.zeros([1, CHANNELS], tl.float32)
    if HAS_BIAS:
        shift = tl.load(bias + channel, used, 0.0).to(tl.float32)
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    first = tl.load(starts + sequence).to(tl.int64)  # row offsets may exceed 32 bits
    count = tl.load(starts + sequence + 1) - tl.load(starts + sequence)
    past = tl.load(read + sequence).to(tl.int64) * slot_stride
    for begin in range(piece * TOKENS, count, tl.num_programs(2) * TOKENS):
        token = begin + tl.arange(0, TOKENS)[:, None]
        inside = used & (token < count)
        total = tl.zeros([TOKENS, CHANNELS], tl.float32) + shift
        for tap in tl.static_range(WIDTH):
            factor = tl.load(weight + channel * WIDTH + tap, used, 0.0).to(tl.float32)
            total += factor * new_inputs(x, token - (WIDTH - 1 - tap), first, channel, x_stride, inside)
        if begin < WIDTH - 1:  # only the first tokens need past inputs
            for tap in tl.static_range(WIDTH - 1):
                factor = tl.load(weight + channel * WIDTH + tap, used, 0.0).to(tl.float32)
                before = token - (WIDTH - 1 - tap)
                total += factor * past_inputs(
                    state, before, past, channel, channel_stride, place_stride, inside, WIDTH - 1, dtype
                )
        result = total.to(y.dtype.element_ty)
        if SILU:
            result = activation(result.to(tl.float32), "silu").to(y.dtype.element_ty)
        tl.store(y + (first + token) * channels + channel, result, inside)
    if piece == 0:
        kept = tl.load(kepts + sequence)
        for j in range(kept):
            slot = tl.load(write + sequence * write_stride + j).to(tl.int64) * slot_stride
            for place in tl.static_range(WIDTH - 1):
                token = count - (kept - 1 - j) - (WIDTH - 1) + place + tl.zeros([1, CHANNELS], tl.int32)
                numbers = new_inputs(x, token, first, channel, x_stride, used) + past_inputs(
                    state, token, past, channel, channel_stride, place_stride, used, WIDTH - 1, dtype
                )
                places = state + slot + channel * channel_stride + place * place_stride
                tl.store(places, numbers.to(state.dtype.element_ty), used)


@triton.jit
def token_inputs(x, delta, b, c, token, last, channel, at, x_stride, delta_stride, b_stride, c_stride, used, SIZE):
    """A token's inputs of the scan; zeros after the last token."""
    channels, numbers = used & (token < last), (at < SIZE) & (token < last)
    return (
        tl.load(x + token * x_stride + channel, channels, 0.0).to(tl.float32),
        tl.load(delta + token * delta_stride + channel, channels, 0.0).to(tl.float32),
        tl.load(b + token * b_stride + at, numbers, 0.0).to(tl.float32),
        tl.load(c + token * c_stride + at, numbers, 0.0).to(tl.float32),
    )


@triton.jit(do_not_specialize=["write_stride"])
def selective_scan_kernel(
    x,
    delta,
    a,
    b,
    c,
    d,
    state,
    y,
    starts,
    kepts,
    read,
    write,
    channels,
    size,
    x_stride,
    delta_stride,
    b_stride,
    c_stride,
    rate_stride,
    rate_place_stride,
    slot_stride,
    channel_stride,
    place_stride,
    write_stride,
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
    # 64 bits: row offsets may exceed 32.
    first, last = tl.load(starts + sequence).to(tl.int64), tl.load(starts + sequence + 1).to(tl.int64)
    kept = tl.load(kepts + sequence)
    own = channel * channel_stride + at * place_stride
    past = tl.load(read + sequence).to(tl.int64) * slot_stride
    h = tl.load(state + past + own, inside, 0.0).to(tl.float32)
    x0, delta0, b0, c0 = token_inputs(
        x, delta, b, c, first, last, channel, at, x_stride, delta_stride, b_stride, c_stride, used, size
    )
    x1, delta1, b1, c1 = token_inputs(
        x, delta, b, c, first + 1, last, channel, at, x_stride, delta_stride, b_stride, c_stride, used, size
    )
    for token in range(first, last):
        x2, delta2, b2, c2 = token_inputs(
            x, delta, b, c, token + 2, last, channel, at, x_stride, delta_stride, b_stride, c_stride, used, size
        )
        h = tl.exp2(delta0 * rate) * h + (delta0 * x0) * b0
        result = tl.sum(h * c0, 1, keep_dims=True) + skip * x0
        tl.store(y + token * channels + channel, result.to(y.dtype.element_ty), used)
        place = kept - (last - token)
        if place >= 0:
            slot = tl.load(write + sequence * write_stride + place).to(tl.int64) * slot_stride
            tl.store(state + slot + own, h.to(state.dtype.element_ty), inside)
        x0, delta0, b0, c0 = x1, delta1, b1, c1
        x1, delta1, b1, c1 = x2, delta2, b2, c2


def on_device(counts: Tensor | None, host: np.ndarray, like: Tensor) -> Tensor:
    """Counts as a device tensor; callers that never capture a step may pass only the host array."""
    return torch.from_numpy(host.astype(np.int32)).to(like.device) if counts is None else counts


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
    several = CONV_TOKENS if longest > 4 else 1
    pieces = max(1, min(MOST_PIECES, triton.cdiv(longest, several)))
    source = contiguous_rows(x)
    if y.numel() and sequences:
        causal_conv_kernel[(triton.cdiv(channels, block), sequences, pieces)](
            source,
            weight.contiguous(),
            source if bias is None else bias,
            state,
            y,
            on_device(meta.starts, meta.q_start, x),
            on_device(meta.kepts, meta.kept, x),
            meta.read,
            meta.write,
            channels,
            source.stride(0),
            *state.stride(),
            meta.write.stride(0),
            WIDTH=width,
            HAS_BIAS=bias is not None,
            SILU=operation is causal_conv_silu,
            TOKENS=several,
            CHANNELS=block,
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
    source, step, into, out = (contiguous_rows(part) for part in (x, delta, b, c))
    if y.numel() and sequences:
        selective_scan_kernel[(triton.cdiv(channels, block), sequences)](
            source,
            step,
            a,
            into,
            out,
            d,
            state,
            y,
            on_device(meta.starts, meta.q_start, x),
            on_device(meta.kepts, meta.kept, x),
            meta.read,
            meta.write,
            channels,
            size,
            source.stride(0),
            step.stride(0),
            into.stride(0),
            out.stride(0),
            *a.stride(),
            *state.stride(),
            meta.write.stride(0),
            CHANNELS=block,
            SIZE=inner,
            num_warps=1,
            **overlapped(x),
        )
    return y
