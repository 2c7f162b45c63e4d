"""A stored tensor: its storage scheme, the parts that hold the bytes, and its logical shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bankfull.errors import ModelError
from bankfull.weights.formats.dense import BY_DTYPE
from bankfull.weights.scheme import Scheme

__all__ = ["QTensor", "Scheme"]


@dataclass(frozen=True, slots=True)
class QTensor:
    """Invariant: every part has the leading dimensions of `shape`; only the last one differs, by blocks.

    The scheme defines the parts. Block formats have one, "blocks": uint8 of shape (*shape[:-1], shape[-1] // block *
    block_bytes).
    """

    scheme: Scheme
    parts: Mapping[str, Tensor]
    shape: tuple[int, ...]
    columns: Tensor | None = None
    """int32 (shape[-1],): the column of the tensor that each stored column is; None: they are in order. A file that
    quantizes columns in another order (act-order) has groups of columns only in that order."""

    @staticmethod
    def dense(tensor: Tensor) -> QTensor:
        scheme = BY_DTYPE.get(tensor.dtype)
        if scheme is None:
            raise ModelError(f"a weight cannot be {tensor.dtype}: convert it to float32, float16, bfloat16 or float64")
        return QTensor(scheme, {"data": tensor}, tuple(tensor.shape))

    @property
    def is_dense(self) -> bool:
        return self.scheme.is_dense

    @property
    def nbytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self.parts.values())

    @property
    def device(self) -> torch.device:
        return next(iter(self.parts.values())).device

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values in `dtype`. May share memory with a dense part: treat the result as read-only."""
        stored = self.scheme.dequantize(self.parts, self.shape, dtype)
        return stored if self.columns is None else stored.index_select(-1, self.columns.argsort())

    @property
    def as_stored(self) -> QTensor:
        """The stored columns as a tensor of their own. Its product takes rows whose columns are gathered by
        `columns`."""
        return replace(self, columns=None)

    @property
    def in_order(self) -> QTensor:
        """The tensor itself, or its values where the stored columns are in another order."""
        return self if self.columns is None else QTensor.dense(self.dequantize())

    def rows(self, index: slice | Tensor) -> QTensor:
        """Select along the first dimension without dequantizing: a view for a slice, a copy for a tensor."""
        if len(self.shape) < 2 and not self.is_dense:
            raise ValueError(f"a {self.scheme.name} vector has no rows to select: its blocks run along them")
        if isinstance(index, slice):
            parts = {name: part[index] for name, part in self.parts.items()}
        else:  # index_select copies whole rows, many times faster than indexing
            flat, shape = index.reshape(-1), index.shape
            parts = {
                name: part.index_select(0, flat).reshape(*shape, *part.shape[1:]) for name, part in self.parts.items()
            }
        count = next(iter(parts.values())).shape[0]
        return QTensor(self.scheme, parts, (count, *self.shape[1:]), self.columns)

    @staticmethod
    def stacked(parts: Sequence[QTensor]) -> QTensor:
        """Concatenated along rows; all parts have the same scheme and columns, in the same order."""
        first = parts[0]
        assert same_columns([part.columns for part in parts])
        assert all(part.scheme == first.scheme and part.shape[1:] == first.shape[1:] for part in parts)
        whole = {name: torch.cat([part.parts[name] for part in parts]) for name in first.parts}
        return QTensor(first.scheme, whole, (sum(part.shape[0] for part in parts), *first.shape[1:]), first.columns)

    def of_each(self, rows: slice) -> QTensor:
        """These rows of each matrix of a three-dimensional tensor, copied."""
        parts = {name: part[:, rows].contiguous() for name, part in self.parts.items()}
        count = next(iter(parts.values())).shape[1]
        return QTensor(self.scheme, parts, (self.shape[0], count, *self.shape[2:]), self.columns)

    def flattened(self) -> QTensor:
        """A dense tensor as a vector."""
        return QTensor.dense(self.parts["data"].reshape(-1))

    def reshape_leading(self, *leading: int) -> QTensor:
        """The same bytes with other leading dimensions; the last dimension, along which blocks run, stays."""
        parts = {name: part.reshape(*leading, part.shape[-1]) for name, part in self.parts.items()}
        return QTensor(self.scheme, parts, (*leading, self.shape[-1]), self.columns)

    def to(self, device: torch.device | str) -> QTensor:
        columns = None if self.columns is None else self.columns.to(device)
        return QTensor(self.scheme, {name: part.to(device) for name, part in self.parts.items()}, self.shape, columns)


def same_columns(given: Sequence[Tensor | None]) -> bool:
    """Whether all of these name the same columns in the same order."""
    known = [None if columns is None else columns.tolist() for columns in given]
    return all(columns == known[0] for columns in known)
