"""Tensors in memory as a model's source, for layers that no file holds."""

from __future__ import annotations

import torch
from torch import Tensor

from bankfull.layers.build import Build
from bankfull.ops import kit_for
from bankfull.weights.qtensor import QTensor


class Tensors:
    """The part of a `TensorSource` that layers read."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def has(self, name: str) -> bool:
        return name in self.tensors

    def get(self, name: str) -> QTensor:
        return QTensor.dense(self.tensors[name])


def build_of(tensors: dict[str, Tensor], dtype: torch.dtype = torch.float32, providers: str = "torch") -> Build:
    return Build(Tensors(tensors), kit_for("cpu", providers), dtype, torch.device("cpu"))  # type: ignore[arg-type]
