"""What an operation knows of the processes that run parts of one model: a group of ranks that exchange tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Neighbour(Protocol):
    """A rank that computes the layers before or after this one's."""

    def send(self, x: Tensor) -> None:
        """Start sending; `x` may change afterwards."""

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor: ...


class RankGroup(Protocol):
    """The ranks that split one dimension of a model. All of them make the same calls in the same order."""

    size: int
    index: int
    """The number of this rank in the group."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks; the same bits on each."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """The tensors of all ranks in their order (size, *x.shape); their shapes are equal."""
        ...

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's part of the sum, whose first dimension is divided evenly."""
        ...

    def all_to_all(self, x: Tensor) -> Tensor:
        """Part i of x (size, ...) goes to rank i; the parts that came here, in the order of the ranks."""
        ...

    def exchange(self, parts: Sequence[Tensor], rows: Sequence[int]) -> list[Tensor]:
        """Part i goes to rank i; the parts that came here, `rows` of each rank. They differ in their rows only."""
        ...
