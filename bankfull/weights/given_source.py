"""A model's tensors from a program's own memory."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from bankfull.errors import ModelError
from bankfull.weights.qtensor import QTensor
from bankfull.weights.scheme import Scheme


class GivenTensors:
    """Dense tensors by their names in the model, not copies of them: gradients flow to them."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                raise ModelError(f"weights are given as tensors by name, not {type(tensor).__name__} as {name!r:.80}")
        self._tensors = {name: QTensor.dense(tensor) for name, tensor in tensors.items()}
        self._read: set[str] = set()

    def names(self) -> list[str]:
        return list(self._tensors)

    def has(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._found(name).shape

    def scheme(self, name: str) -> Scheme:
        return self._found(name).scheme

    def get(self, name: str) -> QTensor:
        self._read.add(name)
        return self._found(name)

    def unread(self) -> list[str]:
        return [name for name in self._tensors if name not in self._read]

    def release(self) -> None:
        """Nothing to release: the tensors are the caller's."""

    def _found(self, name: str) -> QTensor:
        if name not in self._tensors:
            raise ModelError(f"the given weights lack the tensor '{name}'")
        return self._tensors[name]
