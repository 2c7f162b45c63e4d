"""What a published format says about one matrix, and how its tensors are checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from bankfull.errors import ModelError
from bankfull.weights.formats.dense import BY_DTYPE
from bankfull.weights.qtensor import QTensor, Scheme
from bankfull.weights.source import TensorSource

EXPANDED = BY_DTYPE[torch.bfloat16]
"""The scheme of matrices that no other scheme holds exactly."""
ELEMENTS_AT_ONCE = 1 << 22
"""Elements that are expanded at a time; bounds the working memory."""
MOST_COLUMNS = 1 << 30
"""Columns that no real matrix has: such a size is refused before it is used."""


class StoredTensors(TensorSource, Protocol):
    """The tensors of a directory as stored, of any dtype."""

    def dtype_of(self, name: str) -> str:
        """The dtype's name in the file: "I32", "F8_E4M3", ..."""

    def stored(self, name: str) -> Tensor:
        """The tensor, which is then marked as read."""


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """What a matrix becomes: its scheme and, if it is expanded, why, as the end of a sentence."""

    scheme: Scheme
    reason: str = ""


class Matrix(Protocol):
    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def owns(self) -> tuple[str, ...]:
        """Tensors of the file that belong to the matrix."""

    def plan(self) -> MatrixPlan:
        """Decided from shapes, dtypes, scales and zero points; codes are not read."""

    def load(self, plan: MatrixPlan) -> QTensor: ...


@dataclass(slots=True)
class Published:
    """A checkpoint's format: `about` names method and bits in a few words, `matrices` are by the weight's name."""

    about: str
    matrices: dict[str, Matrix] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    """Tensors that inference here does not need, such as scales of activations."""


def parts_of(files: StoredTensors, module: str, suffixes: Iterable[str]) -> dict[str, str]:
    """Suffix -> name, for those tensors of a module that the file has."""
    return {suffix: name for suffix in suffixes if files.has(name := f"{module}.{suffix}")}


def require(files: StoredTensors, *names: str) -> None:
    for name in names:
        if not files.has(name):
            raise ModelError(f"The checkpoint lacks the tensor {name}, part of a quantized matrix: download it again.")


def expect_shape(files: StoredTensors, name: str, *allowed: Sequence[int]) -> tuple[int, ...]:
    """The shape of a tensor, which must be one of those allowed."""
    stored = files.shape(name)
    if stored not in {tuple(shape) for shape in allowed}:
        wanted = " or ".join(dict.fromkeys(str(tuple(shape)) for shape in allowed))
        raise ModelError(f"Tensor {name} has shape {stored} where its matrix needs {wanted}: use another checkpoint.")
    return stored


def expect_dtype(files: StoredTensors, name: str, *allowed: str) -> str:
    dtype = files.dtype_of(name)
    if dtype not in allowed:
        raise ModelError(f"Tensor {name} is stored as {dtype} instead of {' or '.join(allowed)}: it is not read.")
    return dtype


def matrix_shape(files: StoredTensors, name: str) -> tuple[int, int]:
    """The two positive sizes of a tensor."""
    shape = files.shape(name)
    if len(shape) != 2 or min(shape) < 1:
        raise ModelError(f"Tensor {name} has shape {shape}, but quantized matrices have two dimensions.")
    return shape[0], shape[1]


def finite(tensor: Tensor, name: str) -> Tensor:
    if not bool(tensor.to(torch.float32).isfinite().all()):
        raise ModelError(
            f"Tensor {name} holds numbers that are not finite: the checkpoint is damaged, download it again."
        )
    return tensor


def whole_number(value: Any, what: str, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ModelError(
            f"The checkpoint has {what} of {str(value)[:40]!r}, which is not a number from {low} to {high}."
        )
    return value


def expanded(shape: tuple[int, int], rows_of: Callable[[slice], Tensor]) -> QTensor:
    """A dense bfloat16 matrix from a function that gives some of its rows, (rows, columns)."""
    rows, columns = shape
    values = torch.empty(shape, dtype=torch.bfloat16)
    step = max(1, ELEMENTS_AT_ONCE // columns)
    for first in range(0, rows, step):
        span = slice(first, min(first + step, rows))
        values[span] = rows_of(span)
    return QTensor.dense(values)
