"""The 256-element super-block formats: a scale per group of 16 or 32 elements, itself quantized against a float16.

Codes are stored in bit planes: a run of 32 (or 64) bytes holds, at rising bit positions, the codes of consecutive runs
of that many elements. The order of multiplications and additions is part of the format: results are bitwise equal to
the reference in float32.

Rounding is a plain encoding of our own. Scales and minima are rounded up when they are themselves quantized, so that
every value stays within its group's range: each error is at most half of the group's scale. Encoders that search for
better scales produce other bytes.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from bankfull.errors import ModelError
from bankfull.weights.scheme import block_scheme, half

BLOCK = 256


def planes(packed: Tensor, run: int, bits: int) -> Tensor:
    """Unpack (n, bytes) into (n, bytes * 8 / bits) codes, plane by plane within each run of `run` bytes."""
    runs = packed.reshape(len(packed), packed.shape[1] // run, 1, run)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device).unsqueeze(-1)
    return ((runs >> shifts) & ((1 << bits) - 1)).flatten(1)


def _grouped(codes: Tensor, group: int) -> Tensor:
    return codes.to(torch.float32).reshape(len(codes), BLOCK // group, group)


def six_bit_scales_and_minima(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Twelve bytes as eight scales and eight minima: the upper two bits of the first eight bytes belong to the
    second half, whose lower four bits are the nibbles of the last four bytes."""
    scale, minimum, low = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat((scale & 63, (low & 15) | ((scale >> 6) << 4)), dim=-1)
    minima = torch.cat((minimum & 63, (low >> 4) | ((minimum >> 6) << 4)), dim=-1)
    return scales.to(torch.float32), minima.to(torch.float32)


def _unpack_q2_k(blocks: Tensor) -> Tensor:
    scales = blocks[:, 0:16]
    scale = half(blocks, 80) * (scales & 15).to(torch.float32)
    minimum = half(blocks, 82) * (scales >> 4).to(torch.float32)
    codes = _grouped(planes(blocks[:, 16:80], 32, 2), 16)
    return (scale.unsqueeze(-1) * codes - minimum.unsqueeze(-1)).flatten(1)


def _unpack_q3_k(blocks: Tensor) -> Tensor:
    packed = blocks[:, 96:108]
    low, high = planes(packed[:, 0:8], 8, 4), planes(packed[:, 8:12], 4, 2)
    scale = half(blocks, 108) * ((low | (high << 4)).to(torch.float32) - 32)
    # The third bit is stored inverted: it is clear where 4 has to be subtracted.
    codes = planes(blocks[:, 32:96], 32, 2) | (planes(blocks[:, 0:32], 32, 1) << 2)
    return (scale.unsqueeze(-1) * (_grouped(codes, 16) - 4)).flatten(1)


def _unpack_q4_k(blocks: Tensor) -> Tensor:
    scales, minima = six_bit_scales_and_minima(blocks[:, 4:16])
    scale, minimum = half(blocks, 0) * scales, half(blocks, 2) * minima
    codes = _grouped(planes(blocks[:, 16:144], 32, 4), 32)
    return (scale.unsqueeze(-1) * codes - minimum.unsqueeze(-1)).flatten(1)


def _unpack_q5_k(blocks: Tensor) -> Tensor:
    scales, minima = six_bit_scales_and_minima(blocks[:, 4:16])
    scale, minimum = half(blocks, 0) * scales, half(blocks, 2) * minima
    codes = planes(blocks[:, 48:176], 32, 4) | (planes(blocks[:, 16:48], 32, 1) << 4)
    return (scale.unsqueeze(-1) * _grouped(codes, 32) - minimum.unsqueeze(-1)).flatten(1)


def _unpack_q6_k(blocks: Tensor) -> Tensor:
    scales = blocks[:, 192:208].contiguous().view(torch.int8).to(torch.float32)
    scale = half(blocks, 208) * scales
    codes = planes(blocks[:, 0:128], 64, 4) | (planes(blocks[:, 128:192], 32, 2) << 4)
    return (scale.unsqueeze(-1) * (_grouped(codes, 16) - 32)).flatten(1)


def packed_planes(codes: Tensor, run: int, bits: int) -> Tensor:
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


def _pack_q2_k(blocks: Tensor) -> Tensor:
    unit, minimum_unit, scales, minima, codes = _shifted(blocks, 16, 2, 4)
    packed = packed_planes(codes, 32, 2)
    return torch.cat((scales | (minima << 4), packed, unit.view(torch.uint8), minimum_unit.view(torch.uint8)), -1)


def _pack_q3_k(blocks: Tensor) -> Tensor:
    unit, scales, codes = _symmetric(blocks, 4, 31)
    six = (scales + 32).to(torch.uint8)
    scales = torch.cat((packed_planes(six & 15, 8, 4), packed_planes(six >> 4, 4, 2)), -1)
    return torch.cat(
        (packed_planes(codes >> 2, 32, 1), packed_planes(codes & 3, 32, 2), scales, unit.view(torch.uint8)), -1
    )


def _pack_q45_k(blocks: Tensor, bits: int) -> Tensor:
    unit, minimum_unit, scales, minima, codes = _shifted(blocks, 32, bits, 6)
    parts = [unit.view(torch.uint8), minimum_unit.view(torch.uint8), _six_bits(scales, minima)]
    if bits == 5:
        parts.append(packed_planes(codes >> 4, 32, 1))
    return torch.cat((*parts, packed_planes(codes & 15, 32, 4)), -1)


def _pack_q6_k(blocks: Tensor) -> Tensor:
    unit, scales, codes = _symmetric(blocks, 32, 127)
    low, high = packed_planes(codes & 15, 64, 4), packed_planes(codes >> 4, 32, 2)
    return torch.cat((low, high, scales.view(torch.uint8), unit.view(torch.uint8)), -1)


SCHEMES = (
    block_scheme("q6_k", BLOCK, 210, _unpack_q6_k, _pack_q6_k, "GGUF's Q6_K: 6 bits, scales in 8"),
    block_scheme("q5_k", BLOCK, 176, _unpack_q5_k, partial(_pack_q45_k, bits=5), "GGUF's Q5_K: 5 bits with minima"),
    block_scheme("q4_k", BLOCK, 144, _unpack_q4_k, partial(_pack_q45_k, bits=4), "GGUF's Q4_K: 4 bits with minima"),
    block_scheme("q3_k", BLOCK, 110, _unpack_q3_k, _pack_q3_k, "GGUF's Q3_K: 3 bits, scales in 6"),
    block_scheme("q2_k", BLOCK, 84, _unpack_q2_k, _pack_q2_k, "GGUF's Q2_K: 2 bits with minima, both in 4"),
)
