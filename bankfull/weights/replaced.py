"""A model's tensors, some of which were made anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bankfull.weights.qtensor import QTensor, Scheme
from bankfull.weights.source_view import SourceView


@dataclass(frozen=True, slots=True)
class ReplacedTensors(SourceView):
    tensors: Mapping[str, QTensor]
    """Tensors in place of the source's, which have the same shapes."""

    def scheme(self, name: str) -> Scheme:
        return self.tensors[name].scheme if name in self.tensors else self.source.scheme(name)

    def get(self, name: str) -> QTensor:
        original = self.source.get(name)
        return self.tensors.get(name, original)
