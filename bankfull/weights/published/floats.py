"""Matrices of 8-bit floats: one scale per tensor, per row, per group of columns, or per block of rows and columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bankfull.errors import ModelError
from bankfull.weights.formats import SCHEMES
from bankfull.weights.formats.fp8_groups import FP8_G128, GROUP
from bankfull.weights.formats.rows import FP8
from bankfull.weights.published.matrix import (
    EXPANDED,
    MatrixPlan,
    StoredTensors,
    expanded,
    expect_dtype,
    finite,
    matrix_shape,
)
from bankfull.weights.qtensor import QTensor

CODES = "F8_E4M3"
SCALES = ("F32", "BF16", "F16", "F8_E8M0", "U8")
"""U8 and F8_E8M0 are exponents of two, plus 127."""


@dataclass(frozen=True, slots=True)
class FloatMatrix:
    shape: tuple[int, int]
    block: tuple[int, int]
    """Rows and columns per scale."""
    owns: tuple[str, ...]
    codes: Callable[[], Tensor]
    scales: Callable[[], Tensor]
    """float32 (rows of blocks, columns of blocks)"""

    def plan(self) -> MatrixPlan:
        columns = self.block[1]
        if columns >= self.shape[1]:
            return MatrixPlan(SCHEMES[FP8])
        if columns % GROUP == 0 and self.shape[1] % GROUP == 0:
            return MatrixPlan(SCHEMES[FP8_G128])
        return MatrixPlan(EXPANDED, f"8-bit floats with a scale per {columns} columns have no scheme here")

    def load(self, plan: MatrixPlan) -> QTensor:
        codes, scales, (down, across) = self.codes(), self.scales(), self.block
        rows, columns = self.shape
        if plan.scheme == EXPANDED:

            def some(own: slice) -> Tensor:
                of_rows = scales[torch.arange(own.start, own.stop) // down]
                return codes[own].to(torch.float32) * of_rows.repeat_interleave(across, -1)[:, :columns]

            return expanded(self.shape, some)
        scales = scales.repeat_interleave(min(down, rows), 0)[:rows]
        if plan.scheme.name == FP8_G128:
            scales = scales.repeat_interleave(across // GROUP, -1)[:, : columns // GROUP]
        return QTensor(plan.scheme, {"codes": codes, "scales": scales.contiguous()}, self.shape)


def float_matrix(files: StoredTensors, codes: str, scales: str, block: tuple[int, int] | None = None) -> FloatMatrix:
    """The tensor `codes` with its `scales`; `block`: rows and columns per scale, if the configuration names them."""
    rows, columns = shape = matrix_shape(files, codes)
    expect_dtype(files, codes, CODES)
    kind, stored = expect_dtype(files, scales, *SCALES), files.shape(scales)
    per_scale = _block_of(stored, shape, block)
    if per_scale is None:
        wanted = f" in blocks of {block[0]} x {block[1]}" if block else ""
        raise ModelError(
            f"Tensor {scales} has shape {stored}, which fits no scales of a {rows} x {columns} matrix{wanted}."
        )
    grid = (-(-rows // per_scale[0]), -(-columns // per_scale[1]))

    def read() -> Tensor:
        tensor = files.stored(scales)
        if kind == "U8":
            tensor = torch.ldexp(torch.ones_like(tensor, dtype=torch.float32), tensor.to(torch.int32) - 127)
        return finite(tensor.to(torch.float32), scales).reshape(grid)

    return FloatMatrix(shape, per_scale, (codes, scales), lambda: files.stored(codes), read)


def _block_of(found: tuple[int, ...], shape: tuple[int, int], block: tuple[int, int] | None) -> tuple[int, int] | None:
    """Rows and columns per scale, from the shape of the scales."""
    rows, columns = shape
    if block is not None and found == (-(-rows // block[0]), -(-columns // block[1])):
        return block
    if found in ((), (1,), (1, 1)):
        return rows, columns
    if found in ((rows,), (rows, 1)):
        return 1, columns
    if len(found) == 2 and found[0] == rows and found[1] > 0 and columns % found[1] == 0:
        return 1, columns // found[1]
    return None
