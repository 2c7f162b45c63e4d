"""2:4 sparse matrices as a device multiplies them: sparse where kernels read them so, dense elsewhere."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

import torch

from bankfull.choices import SPARSE
from bankfull.declared import Trait
from bankfull.weights.formats import two_of_four
from bankfull.weights.formats.dense import BY_DTYPE
from bankfull.weights.qtensor import QTensor, Scheme
from bankfull.weights.requantized import is_inner_matrix, is_table
from bankfull.weights.source import ModelFiles
from bankfull.weights.source_view import SourceView

log = logging.getLogger("bankfull")

WANTED = "2:4"
"""The value of `quantize` for checkpoints that store the zeros of such matrices."""
KERNEL_DTYPES = (torch.bfloat16, torch.float16)
KERNEL_COLUMNS = 64
"""Kernels read matrices whose columns are a multiple of this."""
ELEMENTS_AT_ONCE = 1 << 24
"""Bounds the working memory of compressing a matrix."""


def compressed(matrix: QTensor, dtype: torch.dtype, name: str) -> QTensor:
    """The matrix without its zeros, in `dtype`. Refuses one that is not 2:4 sparse."""
    scheme, columns = two_of_four.BY_DTYPE[dtype], matrix.shape[-1]
    values = matrix.dequantize(dtype).reshape(-1, columns)
    parts = scheme.empty((len(values), columns), values.device)
    step = max(1, ELEMENTS_AT_ONCE // max(columns, 1))
    for first in range(0, len(values), step):
        for part, data in two_of_four.compress(values[first : first + step], name).items():
            parts[part][first : first + step] = data
    leading = matrix.shape[:-1]
    return QTensor(scheme, {part: data.reshape(*leading, data.shape[-1]) for part, data in parts.items()}, matrix.shape)


def in_dtype(weight: QTensor, dtype: torch.dtype) -> QTensor:
    """The same matrix with its kept numbers in another dtype."""
    parts = {**weight.parts, "values": weight.parts["values"].to(dtype)}
    return QTensor(two_of_four.BY_DTYPE[dtype], parts, weight.shape)


def fits_kernels(shape: tuple[int, ...], dtype: torch.dtype | None) -> bool:
    """Whether the kernels of a GPU multiply a 2:4 sparse matrix of this shape by activations of this dtype."""
    return (
        dtype in KERNEL_DTYPES and len(shape) == 2 and shape[0] > 0 and shape[1] > 0 and not shape[1] % KERNEL_COLUMNS
    )


@dataclass(frozen=True, slots=True)
class SparseSource(SourceView):
    """`source` with its 2:4 matrices in `dtype` where kernels read them, and dense elsewhere. `compresses`: matrices
    that hold zeros become sparse, too; all of them must be 2:4."""

    dtype: torch.dtype
    expands: str = ""
    """Why every matrix becomes dense, as the end of a sentence; empty: those do that kernels do not read."""
    compresses: bool = False
    _told: set[str] = field(default_factory=set, repr=False, compare=False)

    def scheme(self, name: str) -> Scheme:
        stored = self.source.scheme(name)
        if stored.is_sparse:
            return two_of_four.BY_DTYPE[self.dtype] if self._keeps(name) else BY_DTYPE[stored.parts[0].dtype]
        if self.compresses and stored.is_dense and is_inner_matrix(self.source, name) and self._keeps(name):
            return two_of_four.BY_DTYPE[self.dtype]
        return stored

    def get(self, name: str) -> QTensor:
        tensor, wanted = self.source.get(name), self.scheme(name)
        if tensor.scheme == wanted:
            return tensor
        if not wanted.is_sparse:
            self._tell(self.expands or f"no kernel reads {self._unread(name)}")
            return QTensor.dense(tensor.dequantize(wanted.parts[0].dtype))
        return in_dtype(tensor, self.dtype) if tensor.scheme.is_sparse else compressed(tensor, self.dtype, name)

    def _keeps(self, name: str) -> bool:
        return not self.expands and not is_table(name) and fits_kernels(self.source.shape(name), self.dtype)

    def _unread(self, name: str) -> str:
        if is_table(name):
            return "a sparse embedding or head"
        shape = self.source.shape(name)
        return "those of experts" if len(shape) == 3 else f"{shape[-1]} columns, no multiple of {KERNEL_COLUMNS}"

    def _tell(self, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            log.warning(f"some 2:4 sparse weights are expanded at load, with their zeros, because {reason}.")


def served(files: ModelFiles, device: str, dtype: torch.dtype, *, kernels: bool, wanted: str | None) -> ModelFiles:
    """The model as a kind of device multiplies its 2:4 matrices in `dtype`. `kernels`: whether kernels may read weights
    as they are stored. `wanted`: the option `quantize`."""
    expands = ""
    if device == "cpu":
        expands = "no kernel of a CPU reads them"
    elif not kernels:
        expands = "the options ask for dense weights"
    elif dtype not in KERNEL_DTYPES:
        expands = "kernels read them in bfloat16 and float16 only"
    if wanted == WANTED:
        SPARSE.refuse(f"quantize={WANTED!r}", {Trait.SPARSE_KERNELS: not expands}, reason=expands)
    if wanted != WANTED and not any(files.source.scheme(name).is_sparse for name in files.source.names()):
        return files
    return replace(files, source=SparseSource(files.source, dtype, expands, wanted == WANTED))
