"""Generated inputs for operations between ranks: a group of one, and one that gets the rows of another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bankfull.ops import Sides
from bankfull.ranks.expert_ranks import ExpertSpread
from tests.ops.cases import Case, Maker


@dataclass(frozen=True)
class Alone:
    """The group of one rank."""

    size: int = 1
    index: int = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x[None]

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x

    def all_to_all(self, x: Tensor) -> Tensor:
        return x

    def exchange(self, parts: Sequence[Tensor], rows: Sequence[int]) -> list[Tensor]:
        assert [len(part) for part in parts] == list(rows)
        return list(parts)


@dataclass(frozen=True)
class Receiver(Alone):
    """The last of some ranks; the others hold parts of `given` and send them."""

    given: Tensor | None = None

    def exchange(self, parts: Sequence[Tensor], rows: Sequence[int]) -> list[Tensor]:
        assert self.given is not None and not any(map(len, parts))
        return [part.to(parts[0].device) for part in self.given.split(list(rows))]


def dispatch(make: Maker) -> Case:
    experts, tokens, hidden = make.size(1, 9), make.size(0, 12), make.size(1, 40)
    chosen = torch.rand(tokens, experts, generator=make.numbers).argsort(-1)[:, : make.size(1, experts)]
    hot = tuple(range(make.size(0, experts)))
    args = (
        make.normal(tokens, hidden),
        chosen.to(torch.int32),
        make.state(*chosen.shape),
        ExpertSpread(experts, 1, 0, hot),
    )
    return Case((*args, Alone()), make.dtype)


def combine(make: Maker) -> Case:
    tokens, per_token, hidden = make.size(0, 12), make.size(1, 4), make.size(1, 40)
    row = torch.arange(tokens).repeat_interleave(per_token)
    sent, counts = torch.arange(tokens), torch.full((2, 1), tokens)
    y = make.normal(tokens * per_token, hidden)
    return Case((y, row, sent, counts, tokens, per_token, ExpertSpread(per_token, 1, 0), Alone()), make.dtype)


def cross(make: Maker) -> Case:
    mixers, tokens, hidden = make.size(1, 3), make.size(0, 12), make.size(1, 40)
    given = make.normal(tokens, hidden)
    sides = Sides(Receiver(mixers + 1, mixers, given), mixers)
    return Case((given[:0].clone(), tokens, sides, True), make.dtype)


GENERATORS: dict[str, Callable[[Maker], Case]] = {
    function.__name__: function for function in (dispatch, combine, cross)
}
