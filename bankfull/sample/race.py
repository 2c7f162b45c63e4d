"""The arithmetic of an exponential race: the same bits on every device and in every kernel.

A token's random number v is uniform in (0, 1), e = -log(1 - v) is its exponential variate, and the token with the
highest score - log(e) wins. Both logarithms are `fixed_log`: additions, multiplications and one division of float64 in
a fixed order. IEEE 754 prescribes the rounding of each, so the result does not depend on a device's exp or log.
Constants are exact in float32, so that no compiler's choice of a literal's type matters.
"""

from __future__ import annotations

import torch
from torch import Tensor

REACH = 27.5
"""Largest distance of a drawn token's score from the best: a probability of 2**-39.7 relative to it. The integer weight
there is still 1, so a token of weight zero is never drawn."""
LOG_SERIES = (
    0.1538461595773697,
    0.1818181872367859,
    0.2222222238779068,
    0.2857142984867096,
    0.4000000059604645,
    0.6666666865348816,
    2.0,
)
"""2/13, 2/11, ..., 2/3, 2 in float32: log((1 + r) / (1 - r)) = r (2 + r**2 (2/3 + r**2 (2/5 + ...)))."""
LN2_HIGH, LN2_LOW = 0.693145751953125, 1.428606765330187e-06
"""log 2 in two parts; the first has so few bits that its product with an exponent is exact."""
ROOT_OF_TWO = 1.4142135381698608
MANTISSA_BITS = 52


def fixed_log(number: Tensor) -> Tensor:
    """The natural logarithm of positive float64 numbers, with an error below 1e-10 of the logarithm near 1."""
    bits = number.view(torch.int64)
    mantissa = ((bits & (1 << MANTISSA_BITS) - 1) | (1023 << MANTISSA_BITS)).view(torch.float64)
    large = mantissa > ROOT_OF_TWO
    mantissa = torch.where(large, mantissa * 0.5, mantissa)
    twos = ((bits >> MANTISSA_BITS) - 1023 + large).double()
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square = ratio * ratio
    series = torch.full_like(square, LOG_SERIES[0])
    for coefficient in LOG_SERIES[1:]:
        series = series * square + coefficient
    return twos * LN2_HIGH + (twos * LN2_LOW + ratio * series)


def gumbel(high: Tensor, low: Tensor) -> Tensor:
    """-log(e) in float64, from the two 32-bit words of a number: v = (52 bits + 1/2) / 2**52, so 1 - v is exact."""
    bits = (high << 20) | (low >> 12)
    return -fixed_log(-fixed_log(1.0 - (bits.double() + 0.5) * 2.0**-MANTISSA_BITS))


def highest_gumbel(high: Tensor) -> Tensor:
    """The highest value of `gumbel` for a high word, up to 1e-9."""
    return -(-torch.log1p(high.double().clamp_min(2.0**-21) * -(2.0**-32))).log()
