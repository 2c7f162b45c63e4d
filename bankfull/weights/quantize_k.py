"""Plain round-to-nearest encodings of the 256-element super-block formats.

Scales and minima are rounded up when they are themselves quantized, so that every value stays within its group's range:
each error is at most half of the group's scale. Encoders that search for better scales produce other bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from bankfull.errors import ModelError

BLOCK = 256


def _pack_planes(codes: Tensor, run: int, bits: int) -> Tensor:
    """(n, k) codes into (n, k * bits / 8) bytes: adjacent runs of `run` codes, 8 / bits runs per byte run."""
    planes = codes.reshape(len(codes), -1, 8 // bits, run)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device).unsqueeze(-1)
    return (planes << shifts).sum(-2, dtype=torch.uint8).flatten(1)


def _half_above(values: Tensor) -> Tensor:
    """The smallest float16 that is at least `values`, which are >= 0."""
    near = values.to(torch.float16)
    above = torch.where(near.to(torch.float64) < values, (near.view(torch.int16) + 1).view(torch.float16), near)
    if not bool(above.isfinite().all()):
        raise ModelError("A tensor has values too large for a quantized type, whose scales are float16.")
    return above


def _quantize_scales(values: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """(n, groups) >= 0 as a float16 (n, 1) times integers up to `top`, never below the values."""
    unit = _half_above(values.amax(-1, keepdim=True) / top)
    return unit, (values / unit.to(torch.float64)).nan_to_num(0.0).ceil().clamp(max=top)


def _codes(values: Tensor, scale: Tensor, lowest: int, highest: int) -> Tensor:
    """(n, groups, size) / (n, groups), rounded; 0 for a scale of 0, which only constant groups have."""
    return (values / scale.unsqueeze(-1)).nan_to_num(0.0).round().clamp(lowest, highest)


def _shifted(blocks: Tensor, group: int, bits: int, scale_bits: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Units of scales and minima, their multiples (n, groups), and codes (n, 256): value = scale * code - minimum."""
    values = blocks.to(torch.float64).reshape(len(blocks), BLOCK // group, group)
    top, most = (1 << bits) - 1, (1 << scale_bits) - 1
    minimum_unit, minima = _quantize_scales((-values.amin(-1)).clamp(min=0), most)
    floor = minimum_unit.to(torch.float64) * minima
    unit, scales = _quantize_scales((values.amax(-1) + floor).clamp(min=0) / top, most)
    codes = _codes(values + floor.unsqueeze(-1), unit.to(torch.float64) * scales, 0, top)
    return unit, minimum_unit, scales.to(torch.uint8), minima.to(torch.uint8), codes.flatten(1).to(torch.uint8)


def _symmetric(blocks: Tensor, levels: int, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """A unit of scales, its signed multiples (n, 16), and codes 0 .. 2 * levels - 1 around `levels`, in groups of 16.

    There is one more code below zero than above: the sign of the scale assigns it to the value farthest from zero.
    """
    values = blocks.to(torch.float64).reshape(len(blocks), BLOCK // 16, 16)
    high, low = values.amax(-1).clamp(min=0), (-values.amin(-1)).clamp(min=0)
    sign = torch.where(high > low, -1.0, 1.0)
    far, near = torch.maximum(high, low), torch.minimum(high, low)
    unit, scales = _quantize_scales(torch.maximum(far / levels, near / (levels - 0.5)), most)
    scales = scales * sign
    codes = _codes(values, unit.to(torch.float64) * scales, -levels, levels - 1) + levels
    return unit, scales.to(torch.int8), codes.flatten(1).to(torch.uint8)


def _six_bits(scales: Tensor, minima: Tensor) -> Tensor:
    """Eight scales and eight minima in twelve bytes."""
    upper = torch.cat((scales[:, :4] | ((scales[:, 4:] >> 4) << 6), minima[:, :4] | ((minima[:, 4:] >> 4) << 6)), -1)
    return torch.cat((upper, (scales[:, 4:] & 15) | ((minima[:, 4:] & 15) << 4)), -1)


def _q2_k(blocks: Tensor) -> Tensor:
    unit, minimum_unit, scales, minima, codes = _shifted(blocks, 16, 2, 4)
    packed = _pack_planes(codes, 32, 2)
    return torch.cat((scales | (minima << 4), packed, unit.view(torch.uint8), minimum_unit.view(torch.uint8)), -1)


def _q3_k(blocks: Tensor) -> Tensor:
    unit, scales, codes = _symmetric(blocks, 4, 31)
    six = (scales + 32).to(torch.uint8)
    scales = torch.cat((_pack_planes(six & 15, 8, 4), _pack_planes(six >> 4, 4, 2)), -1)
    return torch.cat(
        (_pack_planes(codes >> 2, 32, 1), _pack_planes(codes & 3, 32, 2), scales, unit.view(torch.uint8)), -1
    )


def _q45_k(blocks: Tensor, bits: int) -> Tensor:
    unit, minimum_unit, scales, minima, codes = _shifted(blocks, 32, bits, 6)
    parts = [unit.view(torch.uint8), minimum_unit.view(torch.uint8), _six_bits(scales, minima)]
    if bits == 5:
        parts.append(_pack_planes(codes >> 4, 32, 1))
    return torch.cat((*parts, _pack_planes(codes & 15, 32, 4)), -1)


def _q6_k(blocks: Tensor) -> Tensor:
    unit, scales, codes = _symmetric(blocks, 32, 127)
    low, high = _pack_planes(codes & 15, 64, 4), _pack_planes(codes >> 4, 32, 2)
    return torch.cat((low, high, scales.view(torch.uint8), unit.view(torch.uint8)), -1)


ENCODINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "q6_k": _q6_k,
    "q5_k": partial(_q45_k, bits=5),
    "q4_k": partial(_q45_k, bits=4),
    "q3_k": _q3_k,
    "q2_k": _q2_k,
}
