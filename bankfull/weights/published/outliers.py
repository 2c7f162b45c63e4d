"""LLM.int8() as `bankfull quantize --method int8` saves it: int8 rows, and columns in bfloat16 beside them.

| tensors of a module | what they are |
|---|---|
| `weight` (I8, (out, in)), `weight_scale` (F32, (out, 1)) | codes, and a scale for each row |
| `outlier_columns` (I32, (n,)), rising | the input columns that are not rounded; n may be 0 |
| `outlier_weight` (BF16, (out, n)) | the matrix's columns there; the codes there are not used |

A module without the last two is int8 alone (experts), one with a plain `weight` is not quantized. config.json names the
form in `quantization_config` as {"bankfull_method": "int8", "version": 1, "bits": 8}, without `quant_method`:
transformers skips a quantization whose method it does not know, and would take codes for weights, but refuses one
without a method.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bankfull.errors import ModelError
from bankfull.weights.published.compressed_tensors import integer_matrix
from bankfull.weights.published.integers import IntegerMatrix
from bankfull.weights.published.matrix import (
    MatrixPlan,
    Published,
    StoredTensors,
    expect_dtype,
    expect_shape,
    finite,
    require,
)
from bankfull.weights.qtensor import Outliers, QTensor

METHOD = "bankfull-int8"
KEY = "bankfull_method"
VERSION = 1
CONFIG: Mapping[str, Any] = {KEY: "int8", "version": VERSION, "bits": 8}
COLUMNS, VALUES = "outlier_columns", "outlier_weight"


def outlier_names(weight: str) -> tuple[str, str]:
    """The tensors beside a matrix that hold its outlier columns and their values."""
    stem = weight.removesuffix("weight")
    return f"{stem}{COLUMNS}", f"{stem}{VALUES}"


@dataclass(frozen=True, slots=True)
class OutlierMatrix:
    matrix: IntegerMatrix
    files: StoredTensors

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrix.shape

    @property
    def owns(self) -> tuple[str, ...]:
        return (*self.matrix.owns, *outlier_names(self.matrix.name))

    @property
    def outlier_count(self) -> int:
        return self.files.shape(outlier_names(self.matrix.name)[0])[0]

    def plan(self) -> MatrixPlan:
        return self.matrix.plan()

    def load(self, plan: MatrixPlan) -> QTensor:
        return replace(self.matrix.load(plan), outliers=self._outliers())

    def _outliers(self) -> Outliers:
        names = outlier_names(self.matrix.name)
        columns, values = (self.files.stored(name) for name in names)
        return _rising(columns.to(torch.int64), self.shape[1], names[0]), finite(values, names[1])


def read_outliers(files: StoredTensors, config: Mapping[str, Any]) -> Published:
    if config.get("version") != VERSION:
        raise ModelError(
            f"The checkpoint has version {str(config.get('version'))[:20]!r} of the form {METHOD}, and this bankfull "
            f"reads version {VERSION}: update bankfull, or quantize the model again."
        )
    published = Published(f"{METHOD}, LLM.int8(): outlier columns in bfloat16")
    for name in files.names():
        module, _, last = name.rpartition(".")
        if last in (COLUMNS, VALUES):
            require(files, f"{module}.weight", *outlier_names(f"{module}.weight"))
            expect_dtype(files, f"{module}.weight", "I8")
        elif last == "weight" and files.dtype_of(name) == "I8":
            published.matrices[name] = _matrix(files, module)
    return published


def _matrix(files: StoredTensors, module: str) -> IntegerMatrix | OutlierMatrix:
    matrix = integer_matrix(files, module)
    columns, values = outlier_names(f"{module}.weight")
    rows, inner = matrix.shape
    expect_shape(files, f"{module}.weight_scale", (rows, 1))
    if not files.has(columns):
        return matrix
    require(files, values)
    expect_dtype(files, columns, "I32")
    expect_dtype(files, values, "BF16")
    shape = files.shape(columns)
    if len(shape) != 1 or shape[0] > inner:
        raise ModelError(f"Tensor {columns} has shape {shape}, but it lists some of {inner} columns: it is damaged.")
    expect_shape(files, values, (rows, shape[0]))
    return OutlierMatrix(matrix, files)


def _rising(columns: Tensor, inner: int, name: str) -> Tensor:
    """The columns, which must be in order: a column that is listed twice would count twice."""
    inside = bool(((columns >= 0) & (columns < inner)).all())
    if not inside or not bool((columns.diff() > 0).all()):
        raise ModelError(f"Tensor {name} must list columns from 0 to {inner - 1} in rising order: it is damaged.")
    return columns
