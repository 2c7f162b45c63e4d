"""A stored tensor: its storage scheme, the parts that hold the bytes, and its logical shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bankfull.errors import ModelError
from bankfull.weights.formats.dense import BY_DTYPE
from bankfull.weights.scheme import Scheme

__all__ = ["QTensor", "Scheme"]


Outliers = tuple[Tensor, Tensor]
"""Indices of some stored columns (n,), and their values (..., n), which replace those of the scheme."""


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
    outliers: Outliers | None = None
    """Columns that are kept beside the scheme, because they meet large activations (LLM.int8())."""

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
        beside = [self.columns, *(self.outliers or ())]
        held = [*self.parts.values(), *(tensor for tensor in beside if tensor is not None)]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    @property
    def device(self) -> torch.device:
        return next(iter(self.parts.values())).device

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values in `dtype`. May share memory with a dense part: treat the result as read-only."""
        values = self.scheme.dequantize(self.parts, self.shape, dtype)
        if self.outliers is not None:
            values = values.index_copy(-1, self.outliers[0], self.outliers[1].to(dtype))
        return values if self.columns is None else values.index_select(-1, self.columns.argsort())

    @property
    def as_stored(self) -> QTensor:
        """What the scheme holds, as a tensor of its own: without outliers, columns in the stored order."""
        return self if self.is_plain else replace(self, columns=None, outliers=None)

    @property
    def in_stored_order(self) -> QTensor:
        """The tensor with its columns as they are stored, which multiplies an input with columns gathered so."""
        return self if self.columns is None else replace(self, columns=None)

    @property
    def is_plain(self) -> bool:
        """Whether the scheme holds all of it, in order."""
        return self.columns is None and self.outliers is None

    @property
    def plain(self) -> QTensor:
        """The tensor itself, or its values where the scheme does not hold all of it in order."""
        return self if self.is_plain else QTensor.dense(self.dequantize())

    def rows(self, index: slice | Tensor) -> QTensor:
        """Select along the first dimension without dequantizing: a view for a slice, a copy for a tensor."""
        if len(self.shape) < 2 and not self.is_dense:
            raise ValueError(f"a {self.scheme.name} vector has no rows to select: its blocks run along them")

        def selected(part: Tensor) -> Tensor:
            if isinstance(index, slice):
                return part[index]
            # index_select copies whole rows, many times faster than indexing
            return part.index_select(0, index.reshape(-1)).reshape(*index.shape, *part.shape[1:])

        parts = {name: selected(part) for name, part in self.parts.items()}
        count = next(iter(parts.values())).shape[0]
        return self._with(parts, (count, *self.shape[1:]), selected)

    @staticmethod
    def stacked(parts: Sequence[QTensor]) -> QTensor:
        """Concatenated along rows; all parts have the same scheme and columns, in the same order, with the same
        outliers."""
        first = parts[0]
        assert all(part.scheme == first.scheme and part.shape[1:] == first.shape[1:] for part in parts)
        assert same_columns(parts)
        whole = {name: torch.cat([part.parts[name] for part in parts]) for name in first.parts}
        kept = [part.outliers[1] for part in parts if part.outliers is not None]
        return first._with(whole, (sum(part.shape[0] for part in parts), *first.shape[1:]), lambda own: torch.cat(kept))

    def of_each(self, rows: slice) -> QTensor:
        """These rows of each matrix of a three-dimensional tensor, copied."""

        def selected(part: Tensor) -> Tensor:
            return part[:, rows].contiguous()

        parts = {name: selected(part) for name, part in self.parts.items()}
        count = next(iter(parts.values())).shape[1]
        return self._with(parts, (self.shape[0], count, *self.shape[2:]), selected)

    def columns_from(self, first: int, count: int) -> QTensor | None:
        """Adjacent columns without dequantizing, copied; None where they are not whole blocks in the stored order."""
        block = self.scheme.block
        if not self.is_plain or first % block or count % block:
            return None
        parts = {}
        for part in self.scheme.parts:
            stored, begin = self.parts[part.name], first // block * part.per_block
            inside = stored[..., begin : begin + count // block * part.per_block]
            of_row = stored[..., stored.shape[-1] - part.per_row :]
            parts[part.name] = torch.cat((inside, of_row), -1).contiguous()
        return QTensor(self.scheme, parts, (*self.shape[:-1], count))

    def flattened(self) -> QTensor:
        """A dense tensor as a vector."""
        return QTensor.dense(self.parts["data"].reshape(-1))

    def reshape_leading(self, *leading: int) -> QTensor:
        """The same bytes with other leading dimensions; the last dimension, along which blocks run, stays."""

        def shaped(part: Tensor) -> Tensor:
            return part.reshape(*leading, part.shape[-1])

        return self._with({name: shaped(part) for name, part in self.parts.items()}, (*leading, self.shape[-1]), shaped)

    def to(self, device: torch.device | str) -> QTensor:
        columns = None if self.columns is None else self.columns.to(device)
        kept = None if self.outliers is None else (self.outliers[0].to(device), self.outliers[1].to(device))
        parts = {name: part.to(device) for name, part in self.parts.items()}
        return QTensor(self.scheme, parts, self.shape, columns, kept)

    def _with(
        self, parts: Mapping[str, Tensor], shape: tuple[int, ...], of_values: Callable[[Tensor], Tensor]
    ) -> QTensor:
        """Other rows of the same columns. `of_values`: makes the outliers' values from those of this tensor."""
        kept = None if self.outliers is None else (self.outliers[0], of_values(self.outliers[1]))
        return QTensor(self.scheme, parts, shape, self.columns, kept)


def same_columns(parts: Sequence[QTensor]) -> bool:
    """Whether all of these have their columns in the same order, and the same outliers."""

    def facts(part: QTensor) -> tuple[list[int] | None, ...]:
        index = None if part.outliers is None else part.outliers[0]
        return tuple(None if one is None else one.tolist() for one in (part.columns, index))

    return all(facts(part) == facts(parts[0]) for part in parts[1:])
