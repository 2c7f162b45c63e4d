"""MXFP4: 4-bit floats in blocks of 32 with one power of two as scale, the format of gpt-oss's experts.

One part, "blocks" of 17 bytes: the scale's exponent plus 127, then 16 bytes of codes. As in the other block formats,
element i is in the lower and element i + 16 in the upper half of byte i. A code has a sign, two bits of exponent and
one of mantissa.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bankfull.weights.formats import legacy
from bankfull.weights.formats.legacy import nibbles
from bankfull.weights.scheme import block_scheme

if TYPE_CHECKING:
    from bankfull.weights.qtensor import QTensor

BLOCK, BLOCK_BYTES = 32, 17
MXFP4 = "mxfp4"
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
BIAS = 127


def _mxfp4(blocks: Tensor) -> Tensor:
    values = torch.tensor(VALUES, device=blocks.device)
    scale = torch.ldexp(torch.ones_like(blocks[:, :1], dtype=torch.float32), blocks[:, :1].to(torch.int32) - BIAS)
    return values[nibbles(blocks[:, 1:]).to(torch.int64)] * scale


def from_pairs(codes: Tensor, scales: Tensor) -> Tensor:
    """Blocks (..., columns / 32 * 17) from the layout of Hugging Face files: codes (..., columns / 32, 16), in which
    byte i holds elements 2 i and 2 i + 1, and exponents (..., columns / 32)."""
    elements = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    halves = elements[..., :16] | (elements[..., 16:] << 4)
    return torch.cat((scales.unsqueeze(-1), halves), -1).flatten(-2)


def from_values(values: Tensor) -> Tensor:
    """Blocks of the nearest values (..., columns / 32 * 17). The largest number of a block is from 4 to 8 times its
    scale; what is above 6 is clipped."""
    blocks = values.to(torch.float32).unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    exponent = (torch.frexp(largest).exponent - 3).clamp(-BIAS, BIAS).where(largest > 0, 0)
    sizes = torch.ldexp(blocks.abs(), -exponent)
    # The steps between the magnitudes are 1/2 up to 2, 1 up to 4, and 2 beyond.
    codes = torch.where(
        sizes < 2, (2 * sizes).round(), torch.where(sizes < 4, sizes.round() + 2, (sizes / 2).round() + 4)
    )
    codes = codes.clamp_(max=7).to(torch.uint8) | (blocks < 0).to(torch.uint8) << 3
    scales = (exponent + BIAS).to(torch.uint8)
    return torch.cat((scales, codes[..., :16] | codes[..., 16:] << 4), -1).flatten(-2)


SCHEME = block_scheme(MXFP4, BLOCK, BLOCK_BYTES, _mxfp4)
SCHEMES = (SCHEME,)
_TWICE = (0, 1, 2, 3, 4, 6, 8, 12)


def as_q5_0(weight: QTensor) -> QTensor:
    """The same values, bit for bit up to the sign of zero, as q5_0 blocks: twice a value is a whole number from -12 to
    12. A weight with a scale that float16 cannot hold is returned as it is."""
    blocks = weight.parts["blocks"].reshape(-1, BLOCK_BYTES)
    exponent = blocks[:, :1].to(torch.int32) - BIAS - 1
    if not bool(((exponent >= -24) & (exponent <= 15)).all()):
        return weight
    scale = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent).to(torch.float16).view(torch.uint8)
    codes = torch.tensor((*_TWICE, *(-code for code in _TWICE)), dtype=torch.int8, device=blocks.device) + 16
    five_bit = codes.to(torch.uint8)[nibbles(blocks[:, 1:]).to(torch.int64)]
    bits = (five_bit >> 4).reshape(-1, 4, 8) << torch.arange(8, dtype=torch.uint8, device=blocks.device)
    packed = (five_bit[:, :16] & 15) | (five_bit[:, 16:] << 4)
    encoded = torch.cat((scale, bits.sum(-1, dtype=torch.uint8), packed), -1)
    twin = next(scheme for scheme in legacy.SCHEMES if scheme.name == "q5_0")
    shape = (*weight.shape[:-1], twin.row_bytes(weight.shape[-1]))
    return replace(weight, scheme=twin, parts={"blocks": encoded.reshape(shape)})
