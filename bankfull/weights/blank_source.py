"""The tensors of a model without their data."""

from __future__ import annotations

import torch

from bankfull.weights.qtensor import QTensor
from bankfull.weights.scheme import Scheme
from bankfull.weights.source import TensorSource

META = torch.device("meta")


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
