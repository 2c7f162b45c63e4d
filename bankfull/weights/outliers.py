"""A model's tensors with int8 matrices, and the columns of each that stay in bfloat16 (LLM.int8())."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch

from bankfull.weights.formats import SCHEMES
from bankfull.weights.formats.rows import INT8_ROW
from bankfull.weights.qtensor import QTensor, Scheme
from bankfull.weights.quantize import quantize
from bankfull.weights.source import TensorSource
from bankfull.weights.source_view import SourceView

KEPT = torch.bfloat16
"""The dtype of outlier columns."""


@runtime_checkable
class CountsOutliers(Protocol):
    def outlier_count(self, name: str) -> int | None:
        """The number of a matrix's outlier columns, without reading it; None for tensors without such."""
        ...


def outlier_count(source: TensorSource, name: str) -> int | None:
    return source.outlier_count(name) if isinstance(source, CountsOutliers) else None


def keeps_outliers(source: TensorSource) -> bool:
    return any(outlier_count(source, name) is not None for name in source.names())


@dataclass(frozen=True, slots=True)
class OutlierSource(SourceView):
    """`source` with the matrices in `columns` rounded to int8, a scale for each row. A matrix's outlier columns are 0
    in the int8 part, and kept beside it."""

    columns: Mapping[str, Sequence[int]]
    """For each matrix that is rounded, its outlier columns in order; there may be none."""
    device: torch.device

    def scheme(self, name: str) -> Scheme:
        return SCHEMES[INT8_ROW] if name in self.columns else self.source.scheme(name)

    def outlier_count(self, name: str) -> int | None:
        return len(self.columns[name]) if name in self.columns else None

    def get(self, name: str) -> QTensor:
        if name not in self.columns:
            return self.source.get(name)
        matrix = self.source.get(name).to(self.device).dequantize()
        index = torch.tensor(list(self.columns[name]), dtype=torch.int64, device=self.device)
        kept = matrix.index_select(-1, index).to(KEPT)
        return replace(quantize(matrix.index_fill(-1, index, 0), INT8_ROW), outliers=(index, kept))
