"""Filters of the whole distribution: temperature, then top-k, top-p, min-p and typical-p, each on the tokens that the
one before has kept. All sums are over the integer weights of `draw`, so a cut falls on the same token in every batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bankfull.sample.draw import WEIGHT_BITS, centred, weights
from bankfull.sample.table import MIN_P, TEMPERATURE, TOP_K, TOP_P, TYPICAL_P, RowFacts, SamplingTable

_HEAD = 1024
"""Maximum number of best tokens that are selected with top-k; more are taken from a full sort."""


def truncate(scores: Tensor, rows: Tensor, table: SamplingTable, facts: Sequence[RowFacts]) -> Tensor:
    """Scores of the tokens that may be drawn, the others -inf; the maximum is moved to 0 before dividing."""
    reals, wholes = table.reals[rows], table.wholes[rows]
    scores, _ = centred(scores)
    scores = scores / reals[:, TEMPERATURE, None].to(scores.dtype)
    chosen = table.choose(facts, lambda fact: fact.top_k is not None or fact.nucleus)
    if chosen:
        wanted = [facts[line] for line in chosen.lines]
        part = _keep_head(chosen.take(scores), chosen.take(wholes[:, TOP_K]), chosen.take(reals[:, TOP_P]), wanted)
        scores = chosen.put(scores, part)
    chosen = table.choose(facts, lambda fact: fact.min_p)
    if chosen:
        part = chosen.take(scores)
        floor = chosen.take(reals[:, MIN_P, None]).to(part.dtype)
        # The best token has survived so far and has score 0, probability ratio 1.
        scores = chosen.put(scores, part.masked_fill(part.exp() < floor, -torch.inf))
    chosen = table.choose(facts, lambda fact: fact.typical)
    if chosen:
        scores = chosen.put(scores, _keep_typical(chosen.take(scores), chosen.take(reals[:, TYPICAL_P])))
    return scores


def _keep_head(scores: Tensor, top_k: Tensor, top_p: Tensor, facts: Sequence[RowFacts]) -> Tensor:
    """Keeps the `top_k` best tokens and, of these, the fewest whose share reaches `top_p`; lowest ids first among
    equals."""
    top_k, top_p = top_k.unsqueeze(-1), top_p.unsqueeze(-1)
    head, size = _head(scores, top_k, top_p, facts)
    threshold = head.gather(1, size - 1)
    above, equal = scores > threshold, scores == threshold
    room = size - above.sum(-1, keepdim=True)
    return scores.masked_fill(~(above | (equal & (equal.cumsum(-1) <= room))), -torch.inf)


def _head(scores: Tensor, top_k: Tensor, top_p: Tensor, facts: Sequence[RowFacts]) -> tuple[Tensor, Tensor]:
    """The best scores, highest first, and how many of them are kept. Every branch gives the same result."""
    vocab = scores.shape[-1]
    ks = [fact.top_k for fact in facts]
    widest = max((vocab if k is None else k) for k in ks)
    if widest <= _HEAD:
        head = scores.topk(widest).values
        return head, _kept(head, None, top_k, top_p)
    if scores.device.type == "cpu" and vocab > _HEAD and all(k is None or k <= _HEAD for k in ks):
        # The nucleus is nearly always in the head, so a CPU checks before it sorts. A GPU would have to wait.
        head = scores.topk(_HEAD).values
        total = weights(scores).sum(-1, keepdim=True)
        size = _kept(head, total, top_k, top_p)
        if bool((size <= _HEAD).all()):
            return head, size
    head = scores.sort(-1, descending=True).values
    return head, _kept(head, None, top_k, top_p)


def _kept(head: Tensor, total: Tensor | None, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Number of tokens to keep; more than the head has if the head is too short to decide. `total`: the weight of the
    whole line, where the head may be too short."""
    width = head.shape[-1]
    weight = weights(head)
    summed = weight.cumsum(-1)
    inside = summed.gather(1, (top_k - 1).clamp_max(width - 1))
    if total is not None:
        inside = torch.where(top_k <= width, inside, total)
    goal = top_p * inside.double()
    # A rank beyond top_k has all of `inside` before it, and the goal is less.
    needed = ((summed - weight).double() < goal).sum(-1, keepdim=True).clamp_min(1)
    if total is not None:
        reached = (summed[:, -1:].double() >= goal) | (top_k <= width)
        needed = torch.where(reached, needed, width + 1)
    return torch.where(top_p < 1.0, needed, top_k)


def _keep_typical(scores: Tensor, mass: Tensor) -> Tensor:
    """Locally typical sampling (Meister et al., 2022): the tokens whose surprise is nearest to the expected surprise,
    fewest whose share reaches `mass`. The normaliser is in both surprises, and cancels."""
    weight = weights(scores)
    total = weight.sum(-1, keepdim=True)
    surprise = -scores
    parts = torch.where(weight > 0, scores.exp() * surprise, 0.0)
    expected = (parts * 2.0**WEIGHT_BITS).to(torch.int64).sum(-1, keepdim=True).double() / total.double()
    order = (surprise.double() - expected).abs().sort(dim=-1, stable=True).indices
    sorted_weight = weight.gather(1, order)
    before = (sorted_weight.cumsum(-1) - sorted_weight).double()
    mass = mass.unsqueeze(-1)
    kept = (before < mass * total.double()) | (mass >= 1.0)
    return scores.masked_fill(~torch.zeros_like(kept).scatter_(1, order, kept), -torch.inf)
