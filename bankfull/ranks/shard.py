"""The part of a model's weights that one rank holds: which rows or columns of a tensor (`weights.cut` reads them).

A rank builds the model from a configuration with its own share of heads and widths (`ranks.splitting`). A tensor of
the file that is larger than the rank's model needs is cut along the dimension that differs, each part of a fused tensor
by itself, as the axis says. A layer whose inputs were cut adds up its outputs over the ranks. So no family has code of
its own for being split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bankfull.axes import COPIED, Axes, WeightAxis, as_axis
from bankfull.ranks.group import RankGroup

Cut = tuple[int, list[tuple[int, int]]]
"""A dimension, and the first index and the length of each piece along it."""


@dataclass(frozen=True, slots=True)
class Shard:
    group: RankGroup
    _cut_inputs: set[str] = field(default_factory=set)
    """Layers whose weight holds only some of the columns."""
    _cut: set[str] = field(default_factory=set)
    """Tensors of which this rank holds a part."""

    def own(self, name: str, stored: tuple[int, ...], axes: Axes) -> Cut | None:
        """This rank's part of a tensor of the shape `stored`, with the axes that its model has; None if there is no
        such part."""
        if len(stored) != len(axes):
            return None
        differ = [i for i, (whole, mine) in enumerate(zip(stored, axes, strict=True)) if whole != mine]
        if len(differ) != 1:
            return None
        (dimension,) = differ
        parts = as_axis(axes[dimension]).parts
        shares = self._shares(stored[dimension], parts)
        if shares is None:
            return None
        pieces, first = [], 0
        for part, count in zip(parts, shares, strict=True):
            # With fewer shares than ranks, several ranks hold the same one: heads of keys and values.
            pieces.append((first + self.group.index * count // self.group.size * part, int(part)))
            first += count * part
        self._cut.add(name)
        if dimension == len(axes) - 1 and len(axes) > 1 and name.endswith(".weight"):
            self._cut_inputs.add(_layer_of(name))
        return dimension, pieces

    def note_stack(self, name: str, expert: str) -> None:
        """The experts of a layer are one. `name`: of all their weights; `expert`: of one's."""
        if self.has_cut_inputs(expert):
            self._cut_inputs.add(_layer_of(name))

    def holds_bias(self, name: str) -> bool:
        """Whether this rank adds a layer's bias: one does, where outputs are summed."""
        return self.group.index == 0 or not self.has_cut_inputs(name)

    def has_cut_inputs(self, name: str) -> bool:
        return _layer_of(name) in self._cut_inputs

    def is_cut(self, name: str) -> bool:
        return name in self._cut

    def _shares(self, stored: int, parts: Sequence[WeightAxis]) -> list[int] | None:
        """The number of different shares into which ranks cut each part of an axis. It is the same for all parts, but
        where some kinds are copied and others are not: those that are not have a share for each rank, and the stored
        length says how many the others have."""
        ranks, copied = self.group.size, [part.kind in COPIED for part in parts]
        mixed = any(copied) and not all(copied)
        split = sum(part for part, one in zip(parts, copied, strict=True) if mixed and not one)
        shares, rest = divmod(stored - ranks * split, sum(parts) - split)
        if rest or shares < 1 or ranks % shares:
            return None
        return [ranks if mixed and not one else shares for one in copied]


def _layer_of(name: str) -> str:
    """The layer's name of a weight or a bias."""
    return name.rpartition(".")[0]


@dataclass(frozen=True, slots=True)
class RowShare:
    """The rows of a matrix that a rank holds, such as those of an embedding or of a head: equally many on each."""

    count: int
    """Rows of the whole matrix."""
    group: RankGroup

    @property
    def most(self) -> int:
        """Rows of a rank."""
        return -(-self.count // self.group.size)

    @property
    def first(self) -> int:
        return min(self.count, self.group.index * self.most)

    @property
    def rows(self) -> Tensor:
        """The numbers of this rank's rows; where some are missing at the end, the last row is repeated."""
        return torch.arange(self.first, self.first + self.most).clamp_max(self.count - 1)
