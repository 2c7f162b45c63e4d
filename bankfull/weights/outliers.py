"""A model's tensors with int8 matrices, and the columns of each that stay in bfloat16 (LLM.int8())."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bankfull.weights.formats import SCHEMES
from bankfull.weights.formats.rows import INT8_ROW
from bankfull.weights.qtensor import QTensor, Scheme
from bankfull.weights.quantize import quantize
from bankfull.weights.source import TensorSource


@dataclass(frozen=True, slots=True)
class OutlierSource:
    """`source` with the matrices in `columns` rounded to int8, a scale for each row. A matrix's outlier columns are 0
    there; `outliers` has them as they were."""

    source: TensorSource
    columns: Mapping[str, Sequence[int]]
    """For each matrix that is rounded, its outlier columns in order; there may be none."""
    device: torch.device

    def names(self) -> list[str]:
        return self.source.names()

    def has(self, name: str) -> bool:
        return self.source.has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(name)

    def scheme(self, name: str) -> Scheme:
        return SCHEMES[INT8_ROW] if name in self.columns else self.source.scheme(name)

    def get(self, name: str) -> QTensor:
        if name not in self.columns:
            return self.source.get(name)
        return quantize(self._matrix(name).index_fill(-1, self._index(name), 0), INT8_ROW)

    def outliers(self, name: str) -> tuple[Tensor, Tensor] | None:
        """The indices of a matrix's outlier columns, and the columns (out, n) in bfloat16; None for other tensors."""
        if name not in self.columns:
            return None
        index = self._index(name)
        return index, self._matrix(name).index_select(-1, index).to(torch.bfloat16)

    def _matrix(self, name: str) -> Tensor:
        return self.source.get(name).to(self.device).dequantize()

    def _index(self, name: str) -> Tensor:
        return torch.tensor(list(self.columns[name]), dtype=torch.int64, device=self.device)

    def unread(self) -> list[str]:
        return self.source.unread()

    def release(self) -> None:
        self.source.release()
