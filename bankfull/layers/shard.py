"""The part of a model's weights that one rank holds.

A rank builds the model from a configuration with its own share of heads and widths (`models.splitting`). A tensor of
the file that is larger than the rank's model needs is cut along the dimension that differs. A layer whose inputs were
cut adds up its outputs over the ranks. So no family has code of its own for being split.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from bankfull.ops.ranks.group import RankGroup
from bankfull.weights.qtensor import QTensor

_EXPERT = re.compile(r"\.experts\.\d+\.")
Part = tuple[int, int]
"""Rows of one of the parts of a fused tensor: in the file, and on a rank."""


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
        self, name: str, found: QTensor, shape: tuple[int, ...], parts: Sequence[Part] | None = None
    ) -> QTensor | None:
        """This rank's part of a tensor, in the shape that its model has; None if there is no such part. `parts`: those
        of a fused tensor, where `fused` does not name them."""
        if len(found.shape) != len(shape):
            return None
        differ = [i for i, (whole, mine) in enumerate(zip(found.shape, shape, strict=True)) if whole != mine]
        if len(differ) != 1:
            return None
        (axis,) = differ
        parts = parts or self._parts(name, found.shape[axis], shape[axis])
        if any(whole % mine or self.group.size % (whole // mine) for whole, mine in parts):
            return None
        pieces, first = [], 0
        for whole, mine in parts:
            # With fewer parts than ranks, several ranks hold the same one: heads of keys and values.
            number = self.group.index * (whole // mine) // self.group.size
            pieces.append(_slice(found, axis, first + number * mine, mine))
            first += whole
        self._cut.add(name)
        if axis == len(shape) - 1 and len(shape) > 1 and name.endswith(".weight"):
            self._cut_inputs.add(layer_of(name))
        return pieces[0] if len(pieces) == 1 else _joined(pieces, axis)

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


def _slice(found: QTensor, axis: int, first: int, count: int) -> QTensor:
    """Copied: only these rows or columns of the mapped file are read."""
    inside = slice(first, first + count)
    if len(found.shape) == 1:
        return QTensor.dense(found.dequantize()[inside].clone())
    if axis == len(found.shape) - 1:
        return found.columns_from(first, count) or QTensor.dense(found.dequantize()[..., inside].contiguous())
    if axis == 0:
        part = found.rows(inside)
        return replace(part, parts={name: one.clone() for name, one in part.parts.items()})
    assert axis == 1 and len(found.shape) == 3, "only experts' matrices are stacked"
    return found.of_each(inside)


def _joined(pieces: Sequence[QTensor], axis: int) -> QTensor:
    """Parts of a fused tensor, one after another along rows."""
    first = pieces[0]
    assert axis < len(first.shape) - 1 or len(first.shape) == 1, "fused tensors have their parts in rows"
    if axis == 0:
        return QTensor.stacked(pieces)
    parts = {name: torch.cat([piece.parts[name] for piece in pieces], axis) for name in first.parts}
    shape = list(first.shape)
    shape[axis] = sum(piece.shape[axis] for piece in pieces)
    return QTensor(first.scheme, parts, tuple(shape))


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
