"""The five 32-element block formats: one scale (and, for the `_1` kinds, one minimum) per block.

Element i and element i + 16 share byte i of the nibbles. The order of multiplications and additions is part of the
format: results are bitwise equal to the reference in float32, and the bytes of the encoders are the standard's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bankfull.weights.rounding import inverse, signed, stored_half, symmetric
from bankfull.weights.scheme import block_scheme, half


def nibbles(packed: Tensor) -> Tensor:
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def fifth_bits(packed: Tensor) -> Tensor:
    """Four bytes, least significant bit first, as 32 values of 0 or 16."""
    bits = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> bits) & 1).flatten(1) << 4


def _unpack_q4_0(blocks: Tensor) -> Tensor:
    return half(blocks, 0) * (nibbles(blocks[:, 2:]).to(torch.float32) - 8)


def _unpack_q4_1(blocks: Tensor) -> Tensor:
    return half(blocks, 0) * nibbles(blocks[:, 4:]).to(torch.float32) + half(blocks, 2)


def _unpack_q5_0(blocks: Tensor) -> Tensor:
    codes = nibbles(blocks[:, 6:]) | fifth_bits(blocks[:, 2:6])
    return half(blocks, 0) * (codes.to(torch.float32) - 16)


def _unpack_q5_1(blocks: Tensor) -> Tensor:
    codes = nibbles(blocks[:, 8:]) | fifth_bits(blocks[:, 4:8])
    return half(blocks, 0) * codes.to(torch.float32) + half(blocks, 2)


def _unpack_q8_0(blocks: Tensor) -> Tensor:
    return half(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8).to(torch.float32)


def _half_bytes(values: Tensor) -> Tensor:
    """(n, 1) as the two bytes of float16."""
    return stored_half(values).view(torch.uint8)


def _packed_nibbles(codes: Tensor) -> Tensor:
    """Element i in the lower, element i + 16 in the upper half of byte i."""
    return (codes[:, :16] & 15) | (codes[:, 16:] << 4)


def _packed_fifth_bits(codes: Tensor) -> Tensor:
    bits = (codes >> 4).reshape(len(codes), 4, 8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=codes.device)).sum(-1, dtype=torch.uint8)


def _shifted(blocks: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scale, minimum, and codes 0 .. top counted from the minimum."""
    minimum = blocks.amin(-1, keepdim=True)
    scale = (blocks.amax(-1, keepdim=True) - minimum) / top
    codes = ((blocks - minimum) * inverse(scale) + 0.5).trunc().clamp(0, top)
    return scale, minimum, codes.to(torch.uint8)


def _pack_q4_0(blocks: Tensor) -> Tensor:
    scale, codes = symmetric(blocks, 8)
    return torch.cat((_half_bytes(scale), _packed_nibbles(codes)), -1)


def _pack_q4_1(blocks: Tensor) -> Tensor:
    scale, minimum, codes = _shifted(blocks, 15)
    return torch.cat((_half_bytes(scale), _half_bytes(minimum), _packed_nibbles(codes)), -1)


def _pack_q5_0(blocks: Tensor) -> Tensor:
    scale, codes = symmetric(blocks, 16)
    return torch.cat((_half_bytes(scale), _packed_fifth_bits(codes), _packed_nibbles(codes)), -1)


def _pack_q5_1(blocks: Tensor) -> Tensor:
    scale, minimum, codes = _shifted(blocks, 31)
    return torch.cat((_half_bytes(scale), _half_bytes(minimum), _packed_fifth_bits(codes), _packed_nibbles(codes)), -1)


def _pack_q8_0(blocks: Tensor) -> Tensor:
    scale, codes = signed(blocks)
    return torch.cat((_half_bytes(scale), codes.view(torch.uint8)), -1)


SCHEMES = (
    block_scheme("q8_0", 32, 34, _unpack_q8_0, _pack_q8_0, "GGUF's Q8_0: 8 bits with a scale"),
    block_scheme("q5_1", 32, 24, _unpack_q5_1, _pack_q5_1, "GGUF's Q5_1: 5 bits with a scale and a minimum"),
    block_scheme("q5_0", 32, 22, _unpack_q5_0, _pack_q5_0, "GGUF's Q5_0: 5 bits with a scale"),
    block_scheme("q4_1", 32, 20, _unpack_q4_1, _pack_q4_1, "GGUF's Q4_1: 4 bits with a scale and a minimum"),
    block_scheme("q4_0", 32, 18, _unpack_q4_0, _pack_q4_0, "GGUF's Q4_0: 4 bits with a scale"),
)
