"""A model's tensors, some of which were made anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bankfull.weights.qtensor import QTensor, Scheme
from bankfull.weights.source import TensorSource


@dataclass(frozen=True, slots=True)
class ReplacedTensors:
    source: TensorSource
    tensors: Mapping[str, QTensor]
    """In place of the source's, which have the same shapes."""

    def names(self) -> list[str]:
        return self.source.names()

    def has(self, name: str) -> bool:
        return self.source.has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(name)

    def scheme(self, name: str) -> Scheme:
        return self.tensors[name].scheme if name in self.tensors else self.source.scheme(name)

    def get(self, name: str) -> QTensor:
        found = self.source.get(name)
        return self.tensors.get(name, found)

    def unread(self) -> list[str]:
        return self.source.unread()

    def release(self) -> None:
        self.source.release()
