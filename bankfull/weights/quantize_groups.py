"""Round-to-nearest encodings of the group formats: those of q8_0 and q4_0 over groups of other widths, fewer bits, zero
points, and 8-bit floats."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from bankfull.weights.formats.fp8_groups import FP8_G128
from bankfull.weights.formats.groups import GROUPS, name_of, pack_pairs, pack_planes
from bankfull.weights.quantize_rows import LARGEST_FP8
from bankfull.weights.rounding import half, inverse, signed, symmetric

Encoded = tuple[Tensor, ...]


def _int8(groups: Tensor) -> Encoded:
    scale, codes = signed(groups)
    return codes, half(scale)


def _packed(codes: Tensor, bits: int) -> Tensor:
    return pack_pairs(codes) if bits == 4 else pack_planes(codes, bits)


def _symmetric(groups: Tensor, bits: int) -> Encoded:
    scale, codes = symmetric(groups, 2 ** (bits - 1))
    return _packed(codes, bits), half(scale)


def _with_zero(groups: Tensor, bits: int) -> Encoded:
    """The range of the group, widened to include zero, in 2^bits - 1 equal steps; zero itself is kept exactly."""
    top = 2**bits - 1
    low, high = groups.amin(-1, keepdim=True).clamp_(max=0), groups.amax(-1, keepdim=True).clamp_(min=0)
    # Divided before subtracting: the range of finite values may overflow. Codes are counted with the scale as stored.
    scale = half(high / top - low / top)
    inverted = inverse(scale.to(torch.float32))
    zero = (-low * inverted).round_().clamp_(0, top)
    codes = (groups * inverted).round_().add_(zero).clamp_(0, top)
    return _packed(codes.to(torch.uint8), bits), scale, zero.to(torch.uint8)


def _fp8(groups: Tensor) -> Encoded:
    scale = groups.abs().amax(-1, keepdim=True) / LARGEST_FP8
    # Values rounded past the largest code would become NaN.
    scaled = (groups * inverse(scale)).clamp_(-LARGEST_FP8, LARGEST_FP8)
    return scaled.to(torch.float8_e4m3fn), scale


_KINDS: dict[str, Callable[[Tensor], Encoded]] = {
    "int8": _int8,
    **{f"int{bits}": partial(_symmetric, bits=bits) for bits in (4, 3, 2)},
    **{f"uint{bits}": partial(_with_zero, bits=bits) for bits in (4, 3, 2)},
}
ENCODINGS: dict[str, Callable[[Tensor], Encoded]] = {
    **{name_of(kind, group): encode for kind, encode in _KINDS.items() for group in sorted(GROUPS)},
    FP8_G128: _fp8,
}
