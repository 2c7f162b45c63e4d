"""Linear layers with outlier columns on a CPU: the int8 product of the other columns, and a small one beside it.

Both products, and the gathering of columns, are kernels of their own, which a tape records.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bankfull.ops.pointwise.native_columns import run_gather_columns, run_scale_columns
from bankfull.ops.products.body import PLAIN, Epilogue
from bankfull.ops.products.native.linear import run_linear
from bankfull.ops.products.native.packed import PackedWeight, accepts_int8, pack, pack_by_rows, run_linear_int8
from bankfull.ops.products.outliers import linear_outliers, outliers_of
from bankfull.ops.shapes import check_linear
from bankfull.weights.formats.rows import INT8_ROW
from bankfull.weights.qtensor import QTensor

MULTIPLE = 16
"""The kernel multiplies a multiple of so many columns: others are repeated, with weights of zero."""


@dataclass(frozen=True, slots=True)
class PackedOutliers:
    packed: PackedWeight
    columns: Tensor
    """int32: the outlier columns, the last one repeated up to a multiple of MULTIPLE."""
    kept: QTensor
    """Weights of the outlier columns in bfloat16, (outputs, columns)."""
    others: Tensor
    """float32 (inner,): 0 for outlier columns, 1 for the others."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.columns.nbytes + self.kept.nbytes + self.others.nbytes


def _prepare(weight: QTensor) -> PackedOutliers:
    stored = weight.as_stored
    packed = pack_by_rows(stored) if stored.scheme.name == INT8_ROW else pack(stored)
    columns, kept = outliers_of(weight)
    more = -len(columns) % MULTIPLE
    padded = torch.nn.functional.pad(kept.to(torch.bfloat16), (0, more)).contiguous()
    repeated = torch.cat((columns, columns[-1:].expand(more))).to(torch.int32)
    others = torch.ones(weight.shape[-1]).index_fill(0, columns.to(torch.int64), 0)
    return PackedOutliers(packed, repeated, QTensor.dense(padded), others)


@linear_outliers.provider("native", on="cpu", accepts=accepts_int8, prepare=_prepare)
def run_linear_outliers(x: Tensor, weight: PackedOutliers, epilogue: Epilogue = PLAIN) -> Tensor:
    """Activations are rounded as by `linear_int8`; many rows as a whole where that is faster."""
    check_linear(x, weight.shape, epilogue.bias)
    if not len(weight.columns):
        return run_linear_int8(x, weight.packed, epilogue)
    rows = x.reshape(-1, x.shape[-1])
    rest = run_linear_int8(run_scale_columns(rows, weight.others), weight.packed, epilogue)
    outliers = run_linear(run_gather_columns(rows, weight.columns), weight.kept)
    return (rest + outliers).reshape(*x.shape[:-1], -1)
