"""Round to nearest under one scale: what several encodings share."""

from __future__ import annotations

import torch
from torch import Tensor

from bankfull.errors import ModelError


def half(values: Tensor) -> Tensor:
    """As float16, which must hold them."""
    stored = values.to(torch.float16)
    if not bool(stored.isfinite().all()):
        raise ModelError("A tensor has values too large for a quantized type, whose scales are float16.")
    return stored


def inverse(step: Tensor) -> Tensor:
    """1 / step, and 0 where all values are (as good as) zero."""
    inverted = 1 / step
    return inverted.where(inverted.isfinite(), 0.0)


def symmetric(blocks: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Step and codes 0 .. 2 * levels - 1 around `levels`; the value farthest from zero, the first of several, becomes
    code 0, so that its sign decides that of the step."""
    size = blocks.abs()
    places = torch.arange(blocks.shape[-1], device=blocks.device)
    first = places.where(size == size.amax(-1, keepdim=True), blocks.shape[-1]).amin(-1, keepdim=True)
    step = blocks.gather(-1, first) / -levels
    codes = (blocks * inverse(step) + (levels + 0.5)).trunc().clamp(0, 2 * levels - 1)
    return step, codes.to(torch.uint8)


def signed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Step and codes -127 .. 127."""
    step = blocks.abs().amax(-1, keepdim=True) / 127
    scaled = blocks * inverse(step)
    # Halves go away from zero; adding 0.5 instead would carry the float just below a half over the border.
    whole = scaled.abs().floor()
    whole = whole + (scaled.abs() - whole >= 0.5)
    return step, (scaled.sign() * whole).to(torch.int8)
