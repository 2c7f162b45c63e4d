"""The part of a model's weights that one rank holds: which rows or columns of a tensor (`weights.cut` reads them).

A rank builds the model from a configuration with its own share of heads and widths (`ranks.splitting`). A tensor of
the file that is larger than the rank's model needs is cut along the dimension that differs. A layer whose inputs were
cut adds up its outputs over the ranks. So no family has code of its own for being split.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bankfull.ranks.group import RankGroup

_EXPERT = re.compile(r"\.experts\.\d+\.")
Part = tuple[int, int]
"""Rows of one of the parts of a fused tensor: in the file, and on a rank."""
Cut = tuple[int, list[tuple[int, int]]]
"""A dimension, and the first index and the length of each piece along it."""


@dataclass(frozen=True, slots=True)
class Shard:
    group: RankGroup
    fused: Mapping[str, Sequence[Part]] = field(default_factory=dict)
    """Pattern of a tensor's name -> the parts that it holds one after another. Each is split by itself."""
    _cut_inputs: set[str] = field(default_factory=set)
    """Layers whose weight holds only some of the columns."""
    _cut: set[str] = field(default_factory=set)
    """Tensors of which this rank holds a part."""

    def own(
        self, name: str, stored: tuple[int, ...], shape: tuple[int, ...], parts: Sequence[Part] | None = None
    ) -> Cut | None:
        """This rank's part of a tensor of the shape `stored`, in the shape that its model has; None if there is no such
        part. `parts`: those of a fused tensor, where `fused` does not name them."""
        if len(stored) != len(shape):
            return None
        differ = [i for i, (whole, mine) in enumerate(zip(stored, shape, strict=True)) if whole != mine]
        if len(differ) != 1:
            return None
        (axis,) = differ
        parts = parts or self._parts(name, stored[axis], shape[axis])
        if any(whole % mine or self.group.size % (whole // mine) for whole, mine in parts):
            return None
        pieces, first = [], 0
        for whole, mine in parts:
            # With fewer parts than ranks, several ranks hold the same one: heads of keys and values.
            number = self.group.index * (whole // mine) // self.group.size
            pieces.append((first + number * mine, mine))
            first += whole
        self._cut.add(name)
        if axis == len(shape) - 1 and len(shape) > 1 and name.endswith(".weight"):
            self._cut_inputs.add(layer_of(name))
        return axis, pieces

    def holds_bias(self, name: str) -> bool:
        """Whether this rank adds a layer's bias: one does, where outputs are summed."""
        return self.group.index == 0 or not self.has_cut_inputs(name)

    def has_cut_inputs(self, name: str) -> bool:
        return layer_of(name) in self._cut_inputs

    def is_cut(self, name: str) -> bool:
        return name in self._cut

    def _parts(self, name: str, whole: int, mine: int) -> Sequence[Part]:
        for pattern, parts in self.fused.items():
            if (sum(p[0] for p in parts), sum(p[1] for p in parts)) == (whole, mine) and re.search(pattern, name):
                return parts
        return ((whole, mine),)


def layer_of(name: str) -> str:
    """The layer's name of a weight or a bias; experts of a layer are one."""
    return _EXPERT.sub(".experts.", name).rpartition(".")[0]


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
