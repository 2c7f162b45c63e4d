"""Generated inputs for collectives. The other ranks of their group hold what this one holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.ops.cases import Case, Maker
from tests.ops.cases import embedding as plain_embedding
from tests.ops.cases import rms_norm as plain_rms_norm


@dataclass(frozen=True)
class Alike:
    """A group in which all ranks have equal tensors."""

    size: int
    index: int

    def all_reduce(self, x: Tensor) -> Tensor:
        return x * self.size

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.stack([x] * self.size)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return (x * self.size).chunk(self.size)[self.index]

    def all_to_all(self, x: Tensor) -> Tensor:
        return torch.stack([x[self.index]] * self.size)


def group(make: Maker) -> Alike:
    size = make.pick.choice((1, 2, 4))
    return Alike(size, make.size(0, size - 1))


def all_reduce(make: Maker) -> Case:
    return Case((make.normal(make.size(1, 20), make.size(1, 70)), group(make)), make.dtype)


def gather_outputs(make: Maker) -> Case:
    ranks, each = group(make), make.size(2, 40)
    width = ranks.size * each - (make.size(0, 1) if ranks.size > 1 else 0)
    return Case((make.normal(make.size(1, 9), each), ranks, width), make.dtype)


def gather_rows(make: Maker) -> Case:
    ranks, each = group(make), make.size(2, 9)
    rows = ranks.size * each - (make.size(0, 1) if ranks.size > 1 else 0)
    return Case((make.normal(each, make.size(1, 40)), ranks, rows), make.dtype)


def reduce_scatter(make: Maker) -> Case:
    return Case((make.normal(make.size(1, 20), make.size(1, 40)), group(make)), make.dtype)


def spread_embedding(make: Maker) -> Case:
    made = plain_embedding(make)
    ids, table, dtype, scale = made.args
    first = make.size(0, 20)
    return Case((ids + first - make.size(0, first), table, dtype, scale, first, group(make)), make.dtype, made.facts)


def spread_rms_norm(make: Maker) -> Case:
    return Case((*plain_rms_norm(make).args, group(make)), make.dtype)


GENERATORS: dict[str, Callable[[Maker], Case]] = {
    function.__name__: function
    for function in (all_reduce, gather_outputs, gather_rows, reduce_scatter, spread_embedding, spread_rms_norm)
}
