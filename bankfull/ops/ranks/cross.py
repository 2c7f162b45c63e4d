"""Mixers and feed-forward layers on different ranks: hidden states cross from one side to the other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bankfull.ops.cost import Cost
from bankfull.ops.registry import op
from bankfull.ranks.group import RankGroup


@dataclass(frozen=True, slots=True)
class Sides:
    """The ranks that run the same layers: some their mixers, the others their feed-forward layers. The ranks of a side
    have the same tokens."""

    group: RankGroup
    """Both sides; those with mixers first."""
    mixers: int
    """Ranks that run mixers."""

    @property
    def runs_mixers(self) -> bool:
        return self.group.index < self.mixers

    def senders(self, to_feeds: bool) -> range:
        return range(self.mixers) if to_feeds else range(self.mixers, self.group.size)

    def share(self, rank: int, tokens: int, to_feeds: bool) -> range:
        """The rows that a rank sends: each of its side sends as many, the last ones fewer."""
        side = self.senders(to_feeds)
        most = -(-tokens // len(side))
        first = min((rank - side.start) * most, tokens)
        return range(first, min(first + most, tokens))


def _cross_cost(x: Tensor, tokens: int, sides: Sides, to_feeds: bool) -> Cost:
    size, side = x.shape[1] * x.element_size(), sides.senders(to_feeds)
    if sides.group.index not in side:
        return Cost(write=float(tokens * size))
    sent = len(sides.share(sides.group.index, tokens, to_feeds)) * size
    return Cost(read=float(sent), wire=float(sent * (sides.group.size - len(side))))


def _cross_shape(x: Tensor, tokens: int, sides: Sides, to_feeds: bool) -> Tensor:
    return x.new_empty(0 if sides.group.index in sides.senders(to_feeds) else tokens, x.shape[1])


@op(cost=_cross_cost, shape=_cross_shape)
def cross(x: Tensor, tokens: int, sides: Sides, to_feeds: bool) -> Tensor:
    """Rows (tokens, hidden) that every rank of one side has, on every rank of the other side. Each rank sends its share
    to all of the other side, so that every link carries equally much. x: the rows, or none (0, hidden) on the side
    that gets them; the side that sends gets none back."""
    group, senders = sides.group, sides.senders(to_feeds)
    share, none = sides.share(group.index, tokens, to_feeds) if group.index in senders else range(0), x[:0]
    mine = x[share.start : share.stop]
    parts = [none if rank in senders else mine for rank in range(group.size)]
    gets = group.index not in senders
    rows = [len(sides.share(rank, tokens, to_feeds)) if gets and rank in senders else 0 for rank in range(group.size)]
    return torch.cat(group.exchange(parts, rows))
