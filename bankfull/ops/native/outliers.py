"""Linear layers with outlier columns on a CPU: the int8 product of the other columns, and a small one beside it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bankfull.ops.native.packed import PackedWeight, accepts_int8, pack, pack_by_rows, run_linear_int8
from bankfull.ops.reference.outliers import linear_outliers, outliers_of
from bankfull.weights.formats.rows import INT8_ROW
from bankfull.weights.qtensor import QTensor


@dataclass(frozen=True, slots=True)
class PackedOutliers:
    packed: PackedWeight
    columns: Tensor
    kept: Tensor

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.columns.nbytes + self.kept.nbytes


def _prepare(weight: QTensor) -> PackedOutliers:
    stored = weight.as_stored
    packed = pack_by_rows(stored) if stored.scheme.name == INT8_ROW else pack(stored)
    return PackedOutliers(packed, *outliers_of(weight))


@linear_outliers.provider("native", on="cpu", accepts=accepts_int8, prepare=_prepare)
def run_linear_outliers(x: Tensor, weight: PackedOutliers, bias: Tensor | None = None) -> Tensor:
    """Activations are rounded as by `linear_int8`; many rows as a whole where that is faster."""
    y = run_linear_int8(x.index_fill(-1, weight.columns, 0), weight.packed, bias)
    if not len(weight.columns):
        return y
    return y + torch.nn.functional.linear(x.index_select(-1, weight.columns), weight.kept.to(x.dtype))
