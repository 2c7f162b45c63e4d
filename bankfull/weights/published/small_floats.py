"""Matrices of 4-bit floats (a sign, two bits of exponent, one of mantissa): MXFP4 and NVFP4.

Two adjacent columns share a byte, the first in its lower half.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bankfull.errors import ModelError
from bankfull.weights.formats import READ_ONLY
from bankfull.weights.formats.mxfp4 import BLOCK, MXFP4, VALUES, from_pairs
from bankfull.weights.published.matrix import (
    EXPANDED,
    MatrixPlan,
    StoredTensors,
    expanded,
    expect_dtype,
    expect_shape,
    finite,
    matrix_shape,
)
from bankfull.weights.qtensor import QTensor

NVFP4_GROUP = 16


@dataclass(frozen=True, slots=True)
class MXFP4Matrix:
    """A power of two per 32 columns."""

    shape: tuple[int, int]
    owns: tuple[str, ...]
    codes: Callable[[], Tensor]
    exponents: Callable[[], Tensor]

    def plan(self) -> MatrixPlan:
        return MatrixPlan(READ_ONLY[MXFP4])

    def load(self, plan: MatrixPlan) -> QTensor:
        blocks = from_pairs(self.codes().unflatten(-1, (-1, BLOCK // 2)), self.exponents())
        return QTensor(plan.scheme, {"blocks": blocks}, self.shape)


def mxfp4_matrix(files: StoredTensors, codes: str, scales: str) -> MXFP4Matrix:
    rows, half = matrix_shape(files, codes)
    expect_dtype(files, codes, "U8")
    expect_dtype(files, scales, "U8", "F8_E8M0")
    if half % (BLOCK // 2):
        raise ModelError(f"Tensor {codes} has {2 * half} columns, which blocks of {BLOCK} do not divide.")
    expect_shape(files, scales, (rows, half * 2 // BLOCK))
    return MXFP4Matrix(
        (rows, half * 2),
        (codes, scales),
        lambda: files.stored(codes),
        lambda: files.stored(scales).view(torch.uint8),
    )


@dataclass(frozen=True, slots=True)
class NVFP4Matrix:
    """An 8-bit float per 16 columns, and one float32 for all."""

    shape: tuple[int, int]
    owns: tuple[str, ...]
    codes: Callable[[], Tensor]
    scales: Callable[[], Tensor]
    """float32 (out, in / 16)"""

    def plan(self) -> MatrixPlan:
        return MatrixPlan(EXPANDED, "NVFP4 has no scheme here")

    def load(self, plan: MatrixPlan) -> QTensor:
        codes, scales, values = self.codes(), self.scales(), torch.tensor(VALUES)

        def rows(own: slice) -> Tensor:
            elements = torch.stack((codes[own] & 15, codes[own] >> 4), -1).flatten(-2)
            return values[elements.to(torch.int32)] * scales[own].repeat_interleave(NVFP4_GROUP, -1)

        return expanded(self.shape, rows)


def nvfp4_matrix(files: StoredTensors, codes: str, scales: str, whole: str, *, divides: bool) -> NVFP4Matrix:
    """`whole`: the scale of the tensor, by which the others are divided or multiplied."""
    rows, half = matrix_shape(files, codes)
    expect_dtype(files, codes, "U8")
    expect_dtype(files, scales, "F8_E4M3")
    expect_dtype(files, whole, "F32", "BF16", "F16")
    if half % (NVFP4_GROUP // 2):
        raise ModelError(f"Tensor {codes} has {2 * half} columns, which groups of {NVFP4_GROUP} do not divide.")
    expect_shape(files, scales, (rows, half * 2 // NVFP4_GROUP))
    expect_shape(files, whole, (), (1,), (1, 1))

    def read() -> Tensor:
        factor = finite(files.stored(whole).to(torch.float32), whole).reshape(())
        of_groups = finite(files.stored(scales).to(torch.float32), scales)
        if divides and not bool(factor):
            raise ModelError(f"Tensor {whole} is zero, but scales are divided by it: the checkpoint is damaged.")
        return of_groups / factor if divides else of_groups * factor

    return NVFP4Matrix((rows, half * 2), (codes, scales, whole), lambda: files.stored(codes), read)
