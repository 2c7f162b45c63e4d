"""Typical acceptance (Medusa, Cai et al., 2024). **Lossy**: the output does not have the target's distribution.

A draft token x is accepted if p(x) > min(epsilon, delta * exp(-H(p))), p being the target's distribution and H its
entropy: where the target is unsure, less likely tokens pass. The longest path of accepted nodes counts, among equals
the most likely one. One token of the target follows it. A greedy row has one possible token, and loses nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bankfull.decode.rejection import NO_NODE, AcceptedPath
from bankfull.sample.draw import NO_TOKEN, draw
from bankfull.sample.random import NumberKey, Purpose

LOSSY = True
"""Whether output differs from that of plain decoding in distribution."""
EPSILON = 0.09
"""The highest probability that a token ever needs."""
DELTA = 0.3
"""Factor of exp(-entropy); the square root of EPSILON in the publication."""


def thresholds(probs: Tensor, epsilon: float = EPSILON, delta: float = DELTA) -> Tensor:
    """The probability that a token must exceed, for each distribution of `probs` [..., vocab]."""
    entropy = torch.special.entr(probs).sum(-1)
    return (delta * (-entropy).exp()).clamp_max(epsilon)


def accept_typical(
    scores: Tensor,
    tokens: Tensor,
    parents: Tensor,
    key: NumberKey,
    epsilon: float = EPSILON,
    delta: float = DELTA,
) -> AcceptedPath:
    """Arguments as for `bankfull.decode.rejection.accept_tree`; the order of siblings does not matter. The last token
    is the one that plain decoding would draw at its position."""
    lines, width = tokens.shape
    row = torch.arange(lines, device=tokens.device)
    probs = scores.double().softmax(-1)
    bounds = thresholds(probs, epsilon, delta)
    # Index 0 is the root, node i is i + 1. A node that is not accepted has length -1.
    lengths = torch.full((lines, width + 1), -1, dtype=torch.int64, device=tokens.device)
    lengths[:, 0] = 0
    likelihood = torch.zeros((lines, width + 1), dtype=torch.float64, device=tokens.device)
    for node in range(width):
        parent = parents[:, node] + 1
        chance = probs[row, parent, tokens[:, node].clamp_min(0)]
        passes = (tokens[:, node] >= 0) & (lengths[row, parent] >= 0) & (chance > bounds[row, parent])
        lengths[:, node + 1] = torch.where(passes, lengths[row, parent] + 1, -1)
        likelihood[:, node + 1] = likelihood[row, parent] + torch.where(passes, chance, 1.0).log()
    longest = lengths == lengths.amax(-1, keepdim=True)
    end = likelihood.masked_fill(~longest, -torch.inf).argmax(-1)
    depth = lengths[row, end]

    path = torch.full((lines, width + 1), NO_NODE, dtype=torch.int64, device=tokens.device)
    chosen = torch.full_like(path, NO_TOKEN)
    at = NumberKey(key.seed, key.child, key.position + depth)
    chosen[row, depth] = draw(scores[row, end], at, Purpose.TOKEN)
    # From the end to the root; a row that has reached the root writes nothing new.
    back = end - 1
    for step in range(width):
        place = depth - 1 - step
        inside = place >= 0
        column = place.clamp_min(0)
        last = back.clamp_min(0)
        path[row, column] = torch.where(inside, back, path[row, column])
        chosen[row, column] = torch.where(inside, tokens[row, last], chosen[row, column])
        back = torch.where(inside, parents[row, last], back)
    return AcceptedPath(chosen, depth + 1, path[:, :width])
