"""From scores to one token: an exponential race (Gumbel-max) over the tokens that truncation has kept.

Each token gets an exponential variate e from its own random number, keyed by (seed, child, position, purpose, token
id); the token with the lowest e / weight wins, which is token t with probability weight(t) / sum of weights. In
logarithms that is the highest score - log(e). The race has no sums: the result depends neither on the batch nor on how
a device splits the vocabulary. A token's number does not depend on the distribution, so two similar distributions
mostly choose the same token: with total variation distance d between them, with probability (1 - d) / (1 + d) or more.

Truncation uses integer weights: exp(score - highest score) in fixed point with 40 bits. Sums of integers do not depend
on their order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bankfull.sample.race import REACH, gumbel, highest_gumbel
from bankfull.sample.random import NumberKey, high_words, words_of

NO_TOKEN = -1
"""What stands in the place of a token where no score is usable."""
WEIGHT_BITS = 40
"""Fraction bits of a weight."""
_FINALISTS = 8
"""Tokens that get an exact key: the best by the bound from their high words. To lose the winner, 8 others must have
bounds above its key but lower keys, each with a probability of about the vocabulary / 2**32."""


def weights(scores: Tensor) -> Tensor:
    """int64 weights of scores whose maximum is at most 0; a vocabulary of 2**22 sums to less than 2**63."""
    return scores.exp().mul_(2.0**WEIGHT_BITS).to(torch.int64)


def centred(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Scores with their maximum moved to 0, and which lines have a finite maximum. A line without one (all masked, NaN,
    +inf) has no finite score afterwards, so that no later filter can make it look usable."""
    top = scores.amax(-1, keepdim=True)
    return scores - top, top.isfinite().squeeze(-1)


def draw(scores: Tensor, key: NumberKey, purpose: int) -> Tensor:
    """Token ids [n] int64 with probability proportional to exp(scores), the lowest id among equal keys; NO_TOKEN where
    a line has no usable score."""
    ids, keys, usable = _finalists(scores, key, purpose, _FINALISTS)
    wins = keys == keys.amax(-1, keepdim=True)
    return torch.where(usable, torch.where(wins, ids, scores.shape[-1]).amin(-1), NO_TOKEN)


def draw_several(scores: Tensor, key: NumberKey, purpose: int, count: int) -> Tensor:
    """`count` distinct token ids [n, count] in the order of a race, the first as in `draw`: each follows the
    distribution without the tokens before it. NO_TOKEN where a line has too few tokens."""
    ids, keys, usable = _finalists(scores, key, purpose, count + _FINALISTS)
    ids, order = ids.sort(-1)
    keys, order = keys.gather(1, order).sort(dim=-1, descending=True, stable=True)
    drawn = torch.where(usable.unsqueeze(-1) & keys.isfinite(), ids.gather(1, order), NO_TOKEN)
    return torch.nn.functional.pad(drawn, (0, max(0, count - drawn.shape[-1])), value=NO_TOKEN)[:, :count]


def _finalists(scores: Tensor, key: NumberKey, purpose: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The ids that may have the highest keys and their exact keys, and which lines have a usable score."""
    scores, usable = centred(scores)
    scores = scores.double().masked_fill(scores < -REACH, -torch.inf)
    words = high_words(key, purpose, scores.shape[-1])
    ids = (scores + highest_gumbel(words)).topk(min(count, scores.shape[-1])).indices
    return ids, scores.gather(1, ids) + gumbel(words.gather(1, ids), words_of(key, purpose, ids, low=True)), usable


def best(scores: Tensor) -> Tensor:
    """The token of the highest score, the lowest id among equals; NO_TOKEN where a line has no usable score."""
    top, token = scores.max(-1)
    return torch.where(top.isfinite(), token, NO_TOKEN)
