"""A stored tensor: its storage scheme, the parts that hold the bytes, and its logical shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from bankfull.errors import ModelError
from bankfull.weights.formats.dense import BY_DTYPE
from bankfull.weights.scheme import Scheme

__all__ = ["QTensor", "Scheme"]


HOST = torch.device("cpu")
Outliers = tuple[Tensor, Tensor]
"""Indices of some stored columns (n,), and their values (..., n), which replace those of the scheme."""


class LateParts(Mapping[str, Tensor]):
    """Parts in the host's memory, contiguous, that are made when one of them is first read. Nobody reads them where the
    matrix lies prepared in the store (`weights.store`)."""

    def __init__(self, names: Sequence[str], make: Callable[[], Mapping[str, Tensor]]) -> None:
        self._names, self._make = names, make
        self._made: Mapping[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        if self._made is None:
            self._made = self._make()
            del self._make  # with it the tensors that these were made from
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    @property
    def is_made(self) -> bool:
        return self._made is not None

    def take_over(self, other: LateParts) -> None:
        """Those of `other`, in the place of parts that nobody has read."""
        self._made = {name: other[name] for name in other}
        del self._make


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
    name: str = ""
    """Its name in the model, with what was selected from it; "" for one that no file holds."""

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
        held = [tensor for tensor in beside if tensor is not None]
        if isinstance(self.parts, LateParts):
            stored = prod(self.shape[:-1]) * self.scheme.row_bytes(self.shape[-1])
        else:
            stored, held = 0, [*self.parts.values(), *held]
        return stored + sum(tensor.numel() * tensor.element_size() for tensor in held)

    @property
    def device(self) -> torch.device:
        return HOST if isinstance(self.parts, LateParts) else next(iter(self.parts.values())).device

    @property
    def is_in_host_memory(self) -> bool:
        """Whether its parts are contiguous in the host's memory, or will be when they are read."""
        if isinstance(self.parts, LateParts):
            return True
        return all(part.is_cpu and part.is_contiguous() for part in self.parts.values())

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
        name = f"{self.name}[{index.start}:{index.stop}]" if self.name and isinstance(index, slice) else ""
        return replace(self._with(parts, (count, *self.shape[1:]), selected), name=name)

    def reordered(self, order: Tensor) -> QTensor:
        """Its rows in another order, which nobody changes later: they are copied when they are read."""
        if not self.is_plain or not self.is_in_host_memory:
            return self.rows(order)
        return self._late(self.shape, lambda: self.rows(order).parts, self.name)

    @staticmethod
    def stacked(parts: Sequence[QTensor]) -> QTensor:
        """Concatenated along rows; all parts have the same scheme and columns, in the same order, with the same
        outliers."""
        first = parts[0]
        assert all(part.scheme == first.scheme and part.shape[1:] == first.shape[1:] for part in parts)
        assert same_columns(parts)
        shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
        name = "" if any(not part.name for part in parts) else " ".join((first.name, "to", parts[-1].name))

        def joined() -> dict[str, Tensor]:
            return {each.name: torch.cat([part.parts[each.name] for part in parts]) for each in first.scheme.parts}

        if first.is_plain and all(part.is_in_host_memory for part in parts):
            return first._late(shape, joined, name)
        kept = [part.outliers[1] for part in parts if part.outliers is not None]
        return replace(first._with(joined(), shape, lambda own: torch.cat(kept)), name=name)

    def of_each(self, rows: slice) -> QTensor:
        """These rows of each matrix of a three-dimensional tensor, copied."""

        def selected(part: Tensor) -> Tensor:
            return part[:, rows].contiguous()

        shape = (self.shape[0], len(range(self.shape[1])[rows]), *self.shape[2:])
        name = f"{self.name}[:, {rows.start}:{rows.stop}]" if self.name else ""

        def parts() -> dict[str, Tensor]:
            return {name: selected(part) for name, part in self.parts.items()}

        if self.is_plain and self.is_in_host_memory:
            return self._late(shape, parts, name)
        return replace(self._with(parts(), shape, selected), name=name)

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
        if torch.device(device) == self.device:
            return self
        columns = None if self.columns is None else self.columns.to(device)
        kept = None if self.outliers is None else (self.outliers[0].to(device), self.outliers[1].to(device))
        parts = {name: part.to(device) for name, part in self.parts.items()}
        return QTensor(self.scheme, parts, self.shape, columns, kept, self.name)

    def _late(self, shape: tuple[int, ...], make: Callable[[], Mapping[str, Tensor]], name: str) -> QTensor:
        """A plain tensor of the same scheme whose parts are made when they are read."""
        return QTensor(self.scheme, LateParts([part.name for part in self.scheme.parts], make), shape, name=name)

    def _with(
        self, parts: Mapping[str, Tensor], shape: tuple[int, ...], of_values: Callable[[Tensor], Tensor]
    ) -> QTensor:
        """Other rows of the same columns. `of_values`: makes the outliers' values from those of this tensor."""
        kept = None if self.outliers is None else (self.outliers[0], of_values(self.outliers[1]))
        return QTensor(self.scheme, parts, shape, self.columns, kept, self.name)


def same_columns(parts: Sequence[QTensor]) -> bool:
    """Whether all of these have their columns in the same order, and the same outliers."""

    def facts(part: QTensor) -> tuple[list[int] | None, ...]:
        index = None if part.outliers is None else part.outliers[0]
        return tuple(None if one is None else one.tolist() for one in (part.columns, index))

    return all(facts(part) == facts(parts[0]) for part in parts[1:])
