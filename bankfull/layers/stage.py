"""A stage of a pipeline: some adjacent layers of a model. A rank builds the others without data, so that it knows the
whole model's state and holds only its own weights."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from bankfull.ops.ranks.group import Neighbour
from bankfull.weights.qtensor import QTensor
from bankfull.weights.scheme import Scheme
from bankfull.weights.source import TensorSource

META = torch.device("meta")
LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)(?:$|\.)")
"""A layer's number in the names of every family."""


@dataclass(frozen=True, slots=True)
class Stage:
    """The layers first .. last - 1 of a model."""

    first: int
    last: int
    before: Neighbour | None
    """The rank that computes the layers before these; None for the first stage, which embeds tokens."""
    after: Neighbour | None
    """The rank that computes the layers after these; None for the last stage, which has the head."""

    def holds(self, name: str) -> bool:
        """Whether a layer's tensor is needed here; other tensors are."""
        match = LAYER.search(name)
        return match is None or self.first <= int(match[1]) < self.last


class BlankTensors:
    """The tensors of a source without their data. All are dense, whatever they are in the file: nothing multiplies
    them, and a rank cuts its part of a fused matrix with outlier columns by the columns' numbers, which are data."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source

    def names(self) -> list[str]:
        return self._source.names()

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def scheme(self, name: str) -> Scheme:
        return self._source.scheme(name)

    def get(self, name: str) -> QTensor:
        shape = self._source.shape(name)
        return QTensor.dense(torch.empty(shape, device=META))

    def unread(self) -> list[str]:
        return self._source.unread()

    def release(self) -> None:
        pass
