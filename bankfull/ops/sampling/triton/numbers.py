"""Arithmetic of `bankfull.sample` inside kernels: integer weights, cumulative weight thresholds, Philox, and keys of a
race.

A normalized score is never above 0, so kernels use its distance from 0. The bits of that float, read as an integer, are
its key: keys are ordered like distances, the best token first, and -0 equals 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bankfull.sample import race
from bankfull.sample.draw import WEIGHT_BITS

FAR = tl.constexpr(0x7F800000)
"""The key of a banned or missing token."""
REACH = tl.constexpr(28.0)
"""Distances beyond this have zero weight."""
RACE_REACH = tl.constexpr(race.REACH)
"""Tokens at a greater distance are not drawn."""
SLACK = tl.constexpr(1e-4)
"""Above the error of `highest_gumbel_of` and of the distance subtracted from it."""

# exp(-d) = 2**whole * 2**part, with |part| <= 1/2. ln 2 is split in two; the first part has so few bits that its
# product with `whole` is exact. Adding 1.5 * 2**23 rounds to an integer, which is then in the lowest bits.
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN2_FIRST = tl.constexpr(0.693145751953125)
_LN2_REST = tl.constexpr(1.42860677e-06)
_ROUNDER = tl.constexpr(12582912.0)
_ROUNDER_BITS = tl.constexpr(0x4B400000)
_EXPONENT = tl.constexpr(127 + WEIGHT_BITS)

_LOG_13, _LOG_11, _LOG_9, _LOG_7, _LOG_5, _LOG_3, _LOG_1 = (tl.constexpr(each) for each in race.LOG_SERIES)
_FIXED_LN2_HIGH, _FIXED_LN2_LOW = tl.constexpr(race.LN2_HIGH), tl.constexpr(race.LN2_LOW)
_ROOT_OF_TWO = tl.constexpr(race.ROOT_OF_TWO)


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
def race_words(key, calls, LOW: tl.constexpr):
    """Four tensors of uint32, the words of each call of Philox: see `bankfull.sample.random.high_words`. `key`: int64
    seed, child and position, and the purpose."""
    seed, child, position, purpose = key
    same = calls * 0
    return tl.philox(
        seed,
        same + position.to(tl.int32),
        same + (position >> 32).to(tl.int32),
        same + child.to(tl.int32),
        (calls << 8) | (purpose + 128 * LOW),
    )


@triton.jit
def word_of(ids, key, LOW: tl.constexpr):
    """The high or low word of each token's number; the tokens may be any."""
    first, second, third, fourth = race_words(key, ((ids >> 4) << 2) | (ids & 3), LOW)
    place = (ids >> 2) & 3
    return tl.where(place < 2, tl.where(place == 0, first, second), tl.where(place == 2, third, fourth))


@triton.jit
def _fixed_log(number):
    """`bankfull.sample.race.fixed_log`; the kernel must be compiled without fusion of multiplication and addition."""
    bits = number.to(tl.int64, bitcast=True)
    mantissa = ((bits & 0x000FFFFFFFFFFFFF) | 0x3FF0000000000000).to(tl.float64, bitcast=True)
    large = mantissa > _ROOT_OF_TWO
    mantissa = tl.where(large, mantissa * 0.5, mantissa)
    twos = ((bits >> 52) - 1023 + large.to(tl.int64)).to(tl.float64)
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square = ratio * ratio
    series = square * _LOG_13 + _LOG_11
    series = series * square + _LOG_9
    series = series * square + _LOG_7
    series = series * square + _LOG_5
    series = series * square + _LOG_3
    series = series * square + _LOG_1
    return twos * _FIXED_LN2_HIGH + (twos * _FIXED_LN2_LOW + ratio * series)


@triton.jit
def gumbel_of(high, low):
    """The bits of `bankfull.sample.race.gumbel`."""
    bits = (high.to(tl.int64) << 20) | (low.to(tl.int64) >> 12)
    return -_fixed_log(-_fixed_log(1.0 - (bits.to(tl.float64) + 0.5) * (1.0 / (1 << 52))))


@triton.jit
def highest_gumbel_of(high):
    """`bankfull.sample.race.highest_gumbel` in float32, up to SLACK."""
    number = tl.maximum(high.to(tl.float32), 1.0 / (1 << 21)) * (1.0 / (1 << 32))
    rest = ((0xFFFFFFFF - high).to(tl.float32) + 1.0) * (1.0 / (1 << 32))
    series = number * (1.0 / 7.0) + 1.0 / 6.0
    series = series * number + 1.0 / 5.0
    series = series * number + 1.0 / 4.0
    series = series * number + 1.0 / 3.0
    series = series * number + 1.0 / 2.0
    near = (series * number + 1.0) * number
    return -tl.log(tl.where(number < 0.125, near, -tl.log(rest)))
