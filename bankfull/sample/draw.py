"""From scores to one token: inverse CDF over integer weights.

A weight is exp(score - highest score) in fixed point with 40 bits. Sums of integers do not depend on their order, so
the result depends neither on the batch nor on how a device splits a scan, and a token of weight zero cannot be drawn.
The cost: a token 2**40 times less likely than the best one is never drawn.
"""

from __future__ import annotations

import torch
from torch import Tensor

NO_TOKEN = -1
"""In the place of a token where no score is usable."""
WEIGHT_BITS = 40
"""Fraction bits of a weight."""


def weights(scores: Tensor) -> Tensor:
    """int64 weights of scores whose maximum is at most 0; a vocabulary of 2**22 sums to less than 2**63."""
    return scores.exp().mul_(2.0**WEIGHT_BITS).to(torch.int64)


def centred(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Scores with their maximum moved to 0, and which lines have a finite maximum. A line without one (all masked, NaN,
    +inf) has no finite score afterwards, so that no later filter can make it look usable."""
    top = scores.amax(-1, keepdim=True)
    return scores - top, top.isfinite().squeeze(-1)


def draw(scores: Tensor, uniform: Tensor) -> Tensor:
    """Token ids [n] int64 with probability proportional to exp(scores); NO_TOKEN where a line has no usable score."""
    scores, usable = centred(scores)
    summed = weights(scores).cumsum(-1)
    total = summed[:, -1:]
    goal = torch.minimum((uniform.unsqueeze(-1) * total.double()).to(torch.int64), total - 1)
    token = torch.searchsorted(summed, goal, right=True).squeeze(-1).clamp_max(scores.shape[-1] - 1)
    return torch.where(usable, token, NO_TOKEN)


def best(scores: Tensor) -> Tensor:
    """The token of the highest score, the lowest id among equals; NO_TOKEN where a line has no usable score."""
    top, token = scores.max(-1)
    return torch.where(top.isfinite(), token, NO_TOKEN)
