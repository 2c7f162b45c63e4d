"""Round-to-nearest helpers shared by several encodings."""

from __future__ import annotations

import torch
from torch import Tensor

from bankfull.errors import ModelError


def stored_half(values: Tensor) -> Tensor:
    """The values as float16; raises if they are out of range."""
    stored = values.to(torch.float16)
    if not bool(stored.isfinite().all()):
        raise ModelError("A tensor has values too large for a quantized type, whose scales are float16.")
    return stored


def inverse(scale: Tensor) -> Tensor:
    """1 / step, and 0 where all values are zero or nearly zero."""
    inverted = 1 / scale
    return inverted.where(inverted.isfinite(), 0.0)


def _extreme(blocks: Tensor) -> Tensor:
    """(n, 1): the value farthest from zero, the first of several."""
    low, high = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
    extreme = torch.where(high > -low, high, low)
    tied = (high == -low).squeeze(-1).nonzero().squeeze(-1)
    if len(tied):  # equal magnitude with both signs: take the first
        rows = blocks[tied]
        places = torch.arange(blocks.shape[-1], device=blocks.device)
        first = places.where(rows.abs() == high[tied], blocks.shape[-1]).amin(-1, keepdim=True)
        extreme[tied] = rows.gather(-1, first)
    return extreme


def symmetric(blocks: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Scale and codes 0 .. 2 * levels - 1 around `levels`. The value farthest from zero, the first of several, gets
    code 0, so its sign determines the sign of the scale."""
    scale = _extreme(blocks) / -levels
    codes = (blocks * inverse(scale)).add_(levels + 0.5).trunc_().clamp_(0, 2 * levels - 1)
    return scale, codes.to(torch.uint8)


def signed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and codes -127 .. 127."""
    scale = torch.maximum(blocks.amax(-1, keepdim=True).abs(), blocks.amin(-1, keepdim=True).abs()) / 127
    scaled = blocks * inverse(scale)
    whole = scaled.trunc()
    # Ties round away from zero. Doubling the remainder is exact; adding 0.5 instead would round the float just below a
    # half up.
    return scale, scaled.sub_(whole).mul_(2).trunc_().add_(whole).to(torch.int8)
