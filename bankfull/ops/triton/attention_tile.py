"""What the attention kernels share: how a tile of scores joins the running softmax, and what they multiply in.

Scores are kept as powers of two: `exp2` is one instruction, and the factor log2(e) is part of the scores' scale.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.triton.launch import INTERPRETED

FLOATS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
LOG2_E = math.log2(math.e)


def multiplied_as(x: Tensor) -> tl.dtype:
    """The dtype of the operands of a product: that of the queries. The interpreter has no products of bfloat16."""
    return tl.float32 if INTERPRETED else FLOATS[x.dtype]


def score_factors(scale: float, cap: float | None) -> tuple[float, float]:
    """`inner` multiplies a raw score; with a cap, `outer` bounds what `capped` makes of it."""
    if scale <= 0:
        raise ValueError(f"attention: scores can only be scaled by a positive number, not by {scale}")
    if cap is None:
        return scale * LOG2_E, 0.0
    return 2.0 * LOG2_E * scale / cap, cap * LOG2_E


@triton.jit
def look_up(table, at, begin, end, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """The frames of the keys at .. at + BLOCK of a sequence; `at` is a multiple of BLOCK. Only begin .. end is live.

    They stay as they were loaded: Triton pipelines a loop whose loads depend on a load of the step before, but not on
    anything that was computed from it."""
    within = tl.arange(0, BLOCK)
    live = (at + within >= begin) & (at + within < end)
    if BLOCK % PAGE == 0:
        return tl.load(table + at // PAGE + within // PAGE, mask=live, other=0)
    return tl.load(table + (at + within) // PAGE, mask=live, other=0)


@triton.jit
def places(frames, at, frame_stride, place_stride, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Where the same keys lie. Where pages fill a tile evenly, all but the frame is known before the loop, and what is
    left is one wide multiplication of two 32-bit numbers."""
    within = tl.arange(0, BLOCK)
    frames = frames.to(tl.int32)
    if BLOCK % PAGE == 0:
        return frames.to(tl.int64) * frame_stride + (within % PAGE).to(tl.int64) * place_stride
    return frames.to(tl.int64) * frame_stride + ((at + within) % PAGE).to(tl.int64) * place_stride


@triton.jit
def capped(score, inner, outer):
    """cap * tanh(score * scale / cap), in powers of two. tanh x = 1 - 2 / (e^2x + 1), also where e^2x overflows."""
    return outer - 2.0 * outer / (tl.exp2(score * inner) + 1.0)


@triton.jit
def absorbed(score, factor, values, value_scale, peak, total, mixed, GUARDED: tl.constexpr):
    """The running softmax with one tile more: (highest score, sum of weights, weighted values) of every row.

    GUARDED: there may be rows that have seen nothing yet; -inf minus -inf must not become NaN.
    """
    highest = tl.maximum(peak, tl.max(score, 1) * factor)
    base = highest
    if GUARDED:
        base = tl.where(highest == float("-inf"), 0.0, highest)
    weight = tl.exp2(score * factor - base[:, None])
    fade = tl.exp2(peak - base)
    total = total * fade + tl.sum(weight, 1)
    if value_scale is not None:
        weight = weight * value_scale[None, :]
    mixed = tl.dot(weight.to(values.dtype), values, mixed * fade[:, None], input_precision="ieee")
    return highest, total, mixed


@triton.jit
def store_heads(out, mixed, total, token, head, real, out_token, VALUES: tl.constexpr, PADDED_VALUES: tl.constexpr):
    """Weighted values over their sum of weights; a row that saw nothing is zero."""
    numbers = tl.arange(0, PADDED_VALUES)
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    places = out + (token.to(tl.int64) * out_token + head * VALUES)[:, None] + numbers[None, :]
    tl.store(places, mixed.to(out.dtype.element_ty), mask=real[:, None] & (numbers < VALUES)[None, :])
