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


def _extreme(blocks: Tensor) -> Tensor:
    """(n, 1): the value farthest from zero, the first of several."""
    low, high = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
    found = torch.where(high > -low, high, low)
    tied = (high == -low).squeeze(-1).nonzero().squeeze(-1)
    if len(tied):  # both signs lie equally far out: which came first?
        rows = blocks[tied]
        places = torch.arange(blocks.shape[-1], device=blocks.device)
        first = places.where(rows.abs() == high[tied], blocks.shape[-1]).amin(-1, keepdim=True)
        found[tied] = rows.gather(-1, first)
    return found


def symmetric(blocks: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Step and codes 0 .. 2 * levels - 1 around `levels`; the value farthest from zero, the first of several, becomes
    code 0, so that its sign decides that of the step."""
    step = _extreme(blocks) / -levels
    codes = (blocks * inverse(step)).add_(levels + 0.5).trunc_().clamp_(0, 2 * levels - 1)
    return step, codes.to(torch.uint8)


def signed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Step and codes -127 .. 127."""
    step = torch.maximum(blocks.amax(-1, keepdim=True).abs(), blocks.amin(-1, keepdim=True).abs()) / 127
    scaled = blocks * inverse(step)
    whole = scaled.trunc()
    # Halves go away from zero. Twice the rest is exact; adding 0.5 instead would carry the float just below a half over
    # the border.
    return step, scaled.sub_(whole).mul_(2).trunc_().add_(whole).to(torch.int8)
