"""The five 32-element block formats: one scale (and, for the `_1` kinds, one minimum) per block.

Element i and element i + 16 share byte i of the nibbles. The order of multiplications and additions is part of the
format: results are bitwise equal to the reference in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bankfull.weights.scheme import block_scheme, half


def nibbles(packed: Tensor) -> Tensor:
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def fifth_bits(packed: Tensor) -> Tensor:
    """Four bytes, least significant bit first, as 32 values of 0 or 16."""
    bits = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> bits) & 1).flatten(1) << 4


def _q4_0(blocks: Tensor) -> Tensor:
    return half(blocks, 0) * (nibbles(blocks[:, 2:]).to(torch.float32) - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return half(blocks, 0) * nibbles(blocks[:, 4:]).to(torch.float32) + half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    codes = nibbles(blocks[:, 6:]) | fifth_bits(blocks[:, 2:6])
    return half(blocks, 0) * (codes.to(torch.float32) - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    codes = nibbles(blocks[:, 8:]) | fifth_bits(blocks[:, 4:8])
    return half(blocks, 0) * codes.to(torch.float32) + half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return half(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8).to(torch.float32)


SCHEMES = (
    block_scheme("q4_0", 32, 18, _q4_0),
    block_scheme("q4_1", 32, 20, _q4_1),
    block_scheme("q5_0", 32, 22, _q5_0),
    block_scheme("q5_1", 32, 24, _q5_1),
    block_scheme("q8_0", 32, 34, _q8_0),
)
