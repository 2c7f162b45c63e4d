"""2:4 sparse matrices of compressed-tensors: sparse-24-bitmask.

| tensors of a module | what they are |
|---|---|
| `compressed` (rows, columns / 2) | the kept weights, in the order of their columns; floats, int8 or float8 codes |
| `bitmask` (rows, columns / 8), U8 | a bit per column, the lowest of a byte first; two of each four are set |
| `shape` (2, 1) | rows and columns |

Kept floats stay sparse. 8-bit codes, whose scales are tensors beside these, get their zeros back: no scheme here holds
sparse codes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bankfull.errors import ModelError
from bankfull.weights.formats import two_of_four
from bankfull.weights.formats.dense import BY_DTYPE, DTYPES
from bankfull.weights.formats.two_of_four import FOUR
from bankfull.weights.published.matrix import (
    MOST_COLUMNS,
    Matrix,
    MatrixPlan,
    StoredTensors,
    expect_dtype,
    expect_shape,
    matrix_shape,
    require,
)
from bankfull.weights.qtensor import QTensor, Scheme

FORMAT, DENSE = "sparse-24-bitmask", "dense"
PARTS = ("compressed", "bitmask", "shape")
FLOATS = {name.upper(): dtype for name, dtype in DTYPES.items() if dtype in two_of_four.BY_DTYPE}
CODES = ("I8", "F8_E4M3")


def masked_modules(files: StoredTensors, config: Mapping[str, Any]) -> list[str]:
    """Modules whose matrices are stored without their zeros."""
    said = config.get("sparsity_config")
    form = said.get("format") if isinstance(said, Mapping) else None
    if form not in (None, DENSE, FORMAT):
        raise ModelError(
            f"The checkpoint stores sparse weights as '{str(form)[:80]}', which is not read: use one with {FORMAT}, or "
            "one that stores zeros."
        )
    return [name.removesuffix(".bitmask") for name in files.names() if name.endswith(".bitmask")]


@dataclass(frozen=True, slots=True)
class SparseMatrix:
    """Where the tensors of a matrix are; `plan` decides from their shapes and dtypes."""

    files: StoredTensors
    module: str
    shape: tuple[int, int]
    dtype: torch.dtype

    @property
    def owns(self) -> tuple[str, ...]:
        return tuple(f"{self.module}.{part}" for part in PARTS)

    def plan(self) -> MatrixPlan:
        if self.shape[1] % two_of_four.BLOCK:
            return MatrixPlan(BY_DTYPE[self.dtype], f"sparse rows have a multiple of {two_of_four.BLOCK} columns here")
        return MatrixPlan(two_of_four.BY_DTYPE[self.dtype])

    def load(self, plan: MatrixPlan) -> QTensor:
        values, masks, _ = (self.files.stored(name) for name in self.owns)
        if plan.scheme.is_dense:
            return QTensor.dense(unmasked(values, masks, self.shape, self.module))
        positions = two_of_four.positions_of_masks(masks, f"{self.module}.bitmask")
        return QTensor(plan.scheme, {"values": values, "positions": positions}, self.shape)


@dataclass(frozen=True, slots=True)
class Unmasked:
    """A matrix of codes that a reader found in `UnmaskedCodes`."""

    inner: Matrix
    owns: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return self.inner.shape

    def plan(self) -> MatrixPlan:
        return self.inner.plan()

    def load(self, plan: MatrixPlan) -> QTensor:
        return self.inner.load(plan)


def unmasked(values: Tensor, masks: Tensor, shape: tuple[int, int], module: str) -> Tensor:
    """The matrix with its zeros. 8-bit codes of any kind are moved as bytes."""
    rows, columns = shape
    bits = masks[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1
    kept = bits.flatten(1)[:, :columns].to(torch.bool)
    if not bool((kept.unflatten(1, (-1, FOUR)).sum(-1) == 2).all()):
        raise ModelError(
            f"Tensor {module}.bitmask does not keep two of each four columns: it is damaged, download it again."
        )
    whole = values.view(torch.uint8) if values.element_size() == 1 else values
    dense = torch.zeros(rows, columns, dtype=whole.dtype)
    dense[kept] = whole.flatten()
    return dense.view(values.dtype)


def sparse_matrix(files: StoredTensors, module: str) -> SparseMatrix:
    """Refuses tensors that do not fit each other before any of them is read, but for the two numbers of the shape."""
    values, masks, said = (f"{module}.{part}" for part in PARTS)
    require(files, values, masks, said)
    rows, half = matrix_shape(files, values)
    expect_dtype(files, said, "I64", "I32")
    expect_shape(files, said, (2, 1), (2,))
    shape = tuple(files.stored(said).flatten().tolist())
    if shape != (rows, 2 * half) or not 0 < 2 * half <= MOST_COLUMNS or half % 2:
        raise ModelError(
            f"Tensor {said} says {shape}, but {values} keeps {rows} x {half} weights, two of each four columns: it is "
            "damaged, download it again."
        )
    expect_dtype(files, masks, "U8")
    expect_shape(files, masks, (rows, -(-2 * half // 8)))
    kind = expect_dtype(files, values, *FLOATS, *CODES)
    return SparseMatrix(files, module, (rows, 2 * half), FLOATS.get(kind, torch.float32))


class UnmaskedCodes:
    """The tensors of a directory, in which the matrices of 8-bit codes of some modules have their zeros."""

    def __init__(self, files: StoredTensors, matrices: Mapping[str, SparseMatrix]) -> None:
        self._files = files
        self.matrices = {
            f"{module}.weight": matrix
            for module, matrix in matrices.items()
            if files.dtype_of(f"{module}.compressed") in CODES
        }
        self._hidden = {part for matrix in self.matrices.values() for part in matrix.owns}

    def names(self) -> list[str]:
        return [*(name for name in self._files.names() if name not in self._hidden), *self.matrices]

    def has(self, name: str) -> bool:
        return name in self.matrices or (name not in self._hidden and self._files.has(name))

    def shape(self, name: str) -> tuple[int, ...]:
        return self.matrices[name].shape if name in self.matrices else self._files.shape(name)

    def scheme(self, name: str) -> Scheme:
        return self._files.scheme(name)

    def dtype_of(self, name: str) -> str:
        return self._files.dtype_of(f"{self.matrices[name].module}.compressed" if name in self.matrices else name)

    def stored(self, name: str) -> Tensor:
        if name not in self.matrices:
            return self._files.stored(name)
        matrix = self.matrices[name]
        values, masks, _ = (self._files.stored(part) for part in matrix.owns)
        return unmasked(values, masks, matrix.shape, matrix.module)

    def get(self, name: str) -> QTensor:
        return self._files.get(name)

    def unread(self) -> list[str]:
        return self._files.unread()

    def release(self) -> None:
        self._files.release()

    def owned(self, matrices: Mapping[str, Matrix]) -> Iterator[tuple[str, Matrix]]:
        """The matrices that were found here, each with the tensors of the files that belong to it."""
        for name, matrix in matrices.items():
            hidden = self.matrices.get(name)
            others = tuple(part for part in matrix.owns if part != name)
            yield name, matrix if hidden is None else Unmasked(matrix, (*hidden.owns, *others))
