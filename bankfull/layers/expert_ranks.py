"""The ranks over which the experts of a layer are spread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from bankfull.errors import ModelError
from bankfull.ops.ranks.dispatch import ExpertSpread
from bankfull.ops.ranks.group import RankGroup


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
