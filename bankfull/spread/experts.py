"""A mixture whose experts are spread over ranks: tokens travel to the experts, and results travel back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bankfull.errors import ModelError
from bankfull.layers.build import Build
from bankfull.layers.experts import ExpertNames, Experts, ExpertsShape
from bankfull.layers.linear import Linear
from bankfull.layers.placement import Role
from bankfull.ops import all_reduce, combine, dispatch, gather_rows
from bankfull.ranks.expert_ranks import ExpertRanks, hottest


def mixture(
    build: Build,
    shape: ExpertsShape,
    names: ExpertNames | None = None,
    *,
    shared: Callable[[Tensor], Tensor] | None = None,
    shared_gate: Linear | None = None,
) -> Experts:
    """The experts of a layer as `build` spreads them."""
    names = names or ExpertNames()
    if build.experts is None:
        return Experts(build, shape, names, shared=shared, shared_gate=shared_gate)
    return SpreadExperts(build, build.experts, shape, names, shared=shared, shared_gate=shared_gate)


class SpreadExperts(Experts):
    """Each rank of a group holds some of the experts, or a part of the width of some."""

    def __init__(
        self,
        build: Build,
        ranks: ExpertRanks,
        shape: ExpertsShape,
        names: ExpertNames,
        *,
        shared: Callable[[Tensor], Tensor] | None = None,
        shared_gate: Linear | None = None,
    ) -> None:
        build, width = build.of(Role.FEED), ranks.width
        if width is not None:
            assert build.shard is not None and width.index == build.shard.group.index * width.size // build.tensor_ranks
        self.ranks, self.expert_count = ranks, shape.rule.experts
        self.spread = ranks.spread(build.prefix, shape.rule.experts, build.device)
        self._origin = build, names
        self._device = build.device
        self._counts: Tensor | None = None
        super().__init__(build, shape, names, shared=shared, shared_gate=shared_gate)
        if build.reads:
            ranks.layers.append(self)
        self._dispatch, self._combine, self._gather, self._sum = (
            build.bind(each) for each in (dispatch, combine, gather_rows, all_reduce)
        )

    @property
    def held(self) -> Sequence[int]:
        return self.spread.held

    @property
    def inner(self) -> int:
        ranks = self.ranks.width_ranks
        if self.shape.inner % ranks:
            raise ModelError(
                f"The experts' width of {self.shape.inner} cannot be split evenly over {ranks} ranks; choose another "
                "ep."
            )
        return self.shape.inner // ranks

    def _read(self, build: Build, names: ExpertNames) -> None:
        super()._read(build, names)
        if self.ranks.width is not None and self.down_bias is not None:
            # One rank adds it, because the results are summed.
            self.down_bias = self.down_bias * (self.ranks.width.index == 0)

    def count_routing(self) -> None:
        """Count the tokens of each expert from now on."""
        self._counts = torch.zeros(self.rule.experts, dtype=torch.int64, device=self._device)

    def counted_routing(self) -> Tensor:
        """The tokens of each expert (experts,) since `count_routing`, of all ranks; stops counting."""
        counts, self._counts = self._counts, None
        assert counts is not None
        total: Tensor = self._sum(counts, self.ranks.group)
        return total

    def replicate(self, counts: Tensor | Sequence[float], hot: int) -> None:
        """Hold the `hot` experts with the highest counts on every rank, so that their tokens stay where they are. Every
        rank of the group calls it with the same counts, between two steps."""
        assert len(counts) == self.rule.experts
        self.spread = replace(self.spread, hot=hottest(counts, hot))
        self._read(*self._origin)

    def __call__(self, x: Tensor) -> Tensor:
        mine = self.ranks.share(x)
        y = self._beside(mine, self._mixture(mine))
        if self.ranks.tokens is None:
            return y
        gathered: Tensor = self._gather(self.ranks.padded(y, len(x)), self.ranks.tokens, len(x))
        return gathered

    def _routed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = super()._routed(x)
        if self._counts is not None:
            self._counts += torch.bincount(chosen.flatten(), minlength=self.rule.experts)
        return weights, chosen

    def _mixture(self, x: Tensor) -> Tensor:
        """The mixture of this rank's tokens, whose experts other ranks hold, too. All ranks get here in every step,
        also without tokens."""
        weights, chosen = self._routed(x)
        group, spread = self.ranks.group, self.spread
        rows, places, scales, row, sent, counts = self._dispatch(x, chosen, weights, spread, group)
        y = self._run(rows, places, scales) if len(rows) else rows
        mixed: Tensor = self._combine(y, row, sent, counts, len(x), self.rule.per_token, spread, group)
        return mixed if self.ranks.width is None else self._sum(mixed, self.ranks.width)
