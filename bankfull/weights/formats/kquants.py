"""The 256-element super-block formats: a scale per group of 16 or 32 elements, itself quantized against a float16.

Codes are stored in bit planes: a run of 32 (or 64) bytes holds, at rising bit positions, the codes of consecutive runs
of that many elements. The order of multiplications and additions is part of the format: results are bitwise equal to
the reference in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

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


def _q2_k(blocks: Tensor) -> Tensor:
    scales = blocks[:, 0:16]
    scale = half(blocks, 80) * (scales & 15).to(torch.float32)
    minimum = half(blocks, 82) * (scales >> 4).to(torch.float32)
    codes = _grouped(planes(blocks[:, 16:80], 32, 2), 16)
    return (scale.unsqueeze(-1) * codes - minimum.unsqueeze(-1)).flatten(1)


def _q3_k(blocks: Tensor) -> Tensor:
    packed = blocks[:, 96:108]
    low, high = planes(packed[:, 0:8], 8, 4), planes(packed[:, 8:12], 4, 2)
    scale = half(blocks, 108) * ((low | (high << 4)).to(torch.float32) - 32)
    # The third bit is stored inverted: it is clear where 4 has to be subtracted.
    codes = planes(blocks[:, 32:96], 32, 2) | (planes(blocks[:, 0:32], 32, 1) << 2)
    return (scale.unsqueeze(-1) * (_grouped(codes, 16) - 4)).flatten(1)


def _q4_k(blocks: Tensor) -> Tensor:
    scales, minima = six_bit_scales_and_minima(blocks[:, 4:16])
    scale, minimum = half(blocks, 0) * scales, half(blocks, 2) * minima
    codes = _grouped(planes(blocks[:, 16:144], 32, 4), 32)
    return (scale.unsqueeze(-1) * codes - minimum.unsqueeze(-1)).flatten(1)


def _q5_k(blocks: Tensor) -> Tensor:
    scales, minima = six_bit_scales_and_minima(blocks[:, 4:16])
    scale, minimum = half(blocks, 0) * scales, half(blocks, 2) * minima
    codes = planes(blocks[:, 48:176], 32, 4) | (planes(blocks[:, 16:48], 32, 1) << 4)
    return (scale.unsqueeze(-1) * _grouped(codes, 32) - minimum.unsqueeze(-1)).flatten(1)


def _q6_k(blocks: Tensor) -> Tensor:
    scales = blocks[:, 192:208].contiguous().view(torch.int8).to(torch.float32)
    scale = half(blocks, 208) * scales
    codes = planes(blocks[:, 0:128], 64, 4) | (planes(blocks[:, 128:192], 32, 2) << 4)
    return (scale.unsqueeze(-1) * (_grouped(codes, 16) - 32)).flatten(1)


SCHEMES = (
    block_scheme("q2_k", BLOCK, 84, _q2_k),
    block_scheme("q3_k", BLOCK, 110, _q3_k),
    block_scheme("q4_k", BLOCK, 144, _q4_k),
    block_scheme("q5_k", BLOCK, 176, _q5_k),
    block_scheme("q6_k", BLOCK, 210, _q6_k),
)
