"""The ranks over which the experts of a layer are spread."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from bankfull.errors import ModelError
from bankfull.ranks.group import RankGroup


def owner_of(expert: int, experts: int, ranks: int) -> int:
    """The rank that holds an expert: ranks hold experts with consecutive numbers."""
    return expert * ranks // experts


@dataclass(frozen=True, slots=True)
class ExpertSpread:
    """The ranks that run a layer's experts, as one of them sees it."""

    experts: int
    ranks: int
    index: int
    """This rank."""
    hot: tuple[int, ...] = ()
    """Experts that every rank holds: tokens stay where they are."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    held: tuple[int, ...] = field(init=False)
    """Experts that this rank holds, in ascending order."""
    owner: Tensor = field(init=False, repr=False, compare=False)
    """The rank that runs an expert for this rank's tokens, by the expert's number."""
    place: Tensor = field(init=False, repr=False, compare=False)
    """An expert's place in `held`, or -1, by the expert's number."""

    def __post_init__(self) -> None:
        owners = [owner_of(expert, self.experts, self.ranks) for expert in range(self.experts)]
        held = tuple(e for e, owner in enumerate(owners) if owner == self.index or e in self.hot)
        mine = [self.index if e in self.hot else owner for e, owner in enumerate(owners)]
        places = [held.index(e) if e in held else -1 for e in range(self.experts)]
        object.__setattr__(self, "held", held)
        object.__setattr__(self, "owner", torch.tensor(mine, device=self.device))
        object.__setattr__(self, "place", torch.tensor(places, device=self.device))

    def goes(self, chosen: Tensor) -> Tensor:
        """Whether a token of this rank, with these experts, goes to each rank (tokens, ranks)."""
        none = torch.zeros(len(chosen), self.ranks, dtype=torch.bool, device=chosen.device)
        return none.scatter_(1, self.owner[chosen.long()], True)

    def only_on(self, rank: int) -> int:
        """Experts that only this rank runs."""
        return sum(owner_of(e, self.experts, self.ranks) == rank and e not in self.hot for e in range(self.experts))

    def touching(self, experts: int, per_token: int) -> float:
        """The probability that a token has one of this many experts."""
        return 1 - math.comb(self.experts - experts, per_token) / math.comb(self.experts, per_token)

    def leaving(self, tokens: int, per_token: int) -> float:
        """Rows that this rank sends to others."""
        others = (rank for rank in range(self.ranks) if rank != self.index)
        return tokens * sum(self.touching(self.only_on(rank), per_token) for rank in others)

    def coming(self, tokens: int, per_token: int) -> float:
        """Rows that others send to this rank."""
        return tokens * (self.ranks - 1) * self.touching(self.only_on(self.index), per_token)

    def sent(self, tokens: int, per_token: int) -> float:
        """Rows that this rank sends, to itself, too."""
        chance = self.touching(self.only_on(self.index) + len(self.hot), per_token)
        return tokens * chance + self.leaving(tokens, per_token)

    def pairs(self, tokens: int, per_token: int) -> float:
        """Pairs of a token and an expert that this rank computes."""
        alone, hot = self.only_on(self.index), len(self.hot)
        return tokens * per_token * (self.ranks * alone + hot) / self.experts


def hottest(counts: Tensor | Sequence[float], number: int) -> tuple[int, ...]:
    """The experts with the highest counts, in ascending order; the lowest number first among equal ones."""
    ordered = sorted(range(len(counts)), key=lambda expert: (-float(counts[expert]), expert))
    return tuple(sorted(ordered[:number]))


class SpreadLayer(Protocol):
    """A layer whose experts are spread (`layers.experts.Experts`)."""

    @property
    def expert_count(self) -> int: ...
    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert, as this rank holds it."""

    def count_routing(self) -> None: ...
    def counted_routing(self) -> Tensor: ...
    def replicate(self, counts: Tensor, hot: int) -> None: ...


@dataclass(frozen=True, slots=True)
class ExpertRanks:
    """The groups of one rank. With t tensor ranks, c context ranks and e expert ranks (`MeshSpec.ep`), g = gcd(t, e):
    `group` has e ranks, `tokens` the g of them that are tensor ranks with the same tokens, and `width` has t / g."""

    group: RankGroup
    """The ranks that hold different experts. Neighbours: tensor rank i has the experts of rank i % e of its group."""
    tokens: RankGroup | None = None
    """The ranks of `group` that have the same tokens: each sends its share of them, and gets the results of all. None:
    every rank has tokens of its own (context ranks, or a sequence split over tensor ranks)."""
    width: RankGroup | None = None
    """The tensor ranks that hold parts of the width of the same experts; None: experts are whole."""
    hot: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Name of a layer ("model.layers.3.mlp") -> its experts that every rank holds."""
    layers: list[SpreadLayer] = field(default_factory=list, repr=False, compare=False)
    """The layers of this rank that were built for them, in order."""

    @property
    def width_ranks(self) -> int:
        return 1 if self.width is None else self.width.size

    def spread(self, layer: str, experts: int, device: torch.device, hot: Sequence[int] | None = None) -> ExpertSpread:
        """Which rank runs each expert. `hot`: instead of those in `self.hot`."""
        hot = self.hot.get(layer, ()) if hot is None else hot
        if self.group.size > experts:
            raise ModelError(
                f"The {experts} experts of {layer} cannot be spread over {self.group.size} ranks: some would have "
                "none; lower ep."
            )
        if unknown := [expert for expert in hot if not 0 <= expert < experts]:
            raise ModelError(f"{layer} has {experts} experts, so that expert {unknown[0]} cannot be hot.")
        return ExpertSpread(experts, self.group.size, self.group.index, tuple(sorted(set(hot))), device)

    def share(self, x: Tensor) -> Tensor:
        """This rank's tokens: as many on each, fewer on the last ones."""
        if self.tokens is None:
            return x
        most = -(-len(x) // self.tokens.size)
        return x[self.tokens.index * most : (self.tokens.index + 1) * most]

    def padded(self, y: Tensor, rows: int) -> Tensor:
        """A rank's results with as many rows as each rank has of `rows` in total."""
        assert self.tokens is not None
        missing = -(-rows // self.tokens.size) - len(y)
        return torch.cat((y, y.new_zeros(missing, *y.shape[1:]))) if missing else y
