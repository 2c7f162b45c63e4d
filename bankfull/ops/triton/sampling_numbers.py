"""Arithmetic of `bankfull.sample` inside kernels: integer weights, cumulative weight thresholds, and Philox.

A normalized score is never above 0, so kernels use its distance from 0. The bits of that float, read as an integer, are
its key: keys are ordered like distances, the best token first, and -0 equals 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bankfull.sample.draw import WEIGHT_BITS

FAR = tl.constexpr(0x7F800000)
"""The key of a banned or missing token."""
REACH = tl.constexpr(28.0)
"""Distances beyond this have zero weight."""

# exp(-d) = 2**whole * 2**part, with |part| <= 1/2. ln 2 is split in two; the first part has so few bits that its
# product with `whole` is exact. Adding 1.5 * 2**23 rounds to an integer, which is then in the lowest bits.
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN2_FIRST = tl.constexpr(0.693145751953125)
_LN2_REST = tl.constexpr(1.42860677e-06)
_ROUNDER = tl.constexpr(12582912.0)
_ROUNDER_BITS = tl.constexpr(0x4B400000)
_EXPONENT = tl.constexpr(127 + WEIGHT_BITS)


@triton.jit
def distance_of(scores, top, temperature):
    """Rounded after the subtraction and after the division, like the tensor operations."""
    return tl.abs(tl.div_rn(top - scores, temperature))


@triton.jit
def key_of(distance):
    return distance.to(tl.int32, bitcast=True)


@triton.jit
def strength_of(distance):
    """exp(-distance) in units of a weight, within 2 ulps: a weight is its integer part.

    Each operation is explicit, so that every kernel computes the same bits.
    """
    near = tl.minimum(distance, 64.0)
    shifted = tl.fma(near, -_LOG2_E, _ROUNDER)
    whole = shifted - _ROUNDER
    part = tl.fma(whole, -_LN2_REST, tl.fma(whole, -_LN2_FIRST, -near))
    power = (shifted.to(tl.int32, bitcast=True) + (_EXPONENT - _ROUNDER_BITS)) << 23
    return tl.exp2(part * _LOG2_E) * power.to(tl.float32, bitcast=True)


@triton.jit
def weight_of(distance):
    return strength_of(distance).to(tl.int64)


@triton.jit
def least_reaching(share):
    """The smallest integer that, as a float64, is at least `share`: integers above 2**53 are rounded by at most 512
    when they are compared."""
    reaching = tl.ceil(share).to(tl.int64)
    below = reaching - 1024
    for _ in range(10):
        middle = (reaching + below) >> 1
        is_below = middle.to(tl.float64) < share
        below = tl.where(is_below, middle, below)
        reaching = tl.where(is_below, reaching, middle)
    return reaching


@triton.jit
def uniform_of(seed, child, position, PURPOSE: tl.constexpr):
    """float64 in [0, 1): the value of `bankfull.sample.random.uniform`. Words are uint64 below 2**32."""
    word = 0xFFFFFFFF
    first = (position & word).to(tl.uint64)
    second = ((position >> 32) & word).to(tl.uint64)
    third = (child & word).to(tl.uint64)
    fourth = third * 0 + PURPOSE
    key = (seed & word).to(tl.uint64)
    other_key = ((seed >> 32) & word).to(tl.uint64)
    for _ in range(10):
        left = first * 0xD2511F53
        right = third * 0xCD9E8D57
        first = (right >> 32) ^ second ^ key
        third = (left >> 32) ^ fourth ^ other_key
        second = right & word
        fourth = left & word
        key = (key + 0x9E3779B9) & word
        other_key = (other_key + 0xBB67AE85) & word
    bits = ((first >> 5) << 26) | (second >> 6)
    return bits.to(tl.int64).to(tl.float64) * (1.0 / (1 << 53))
