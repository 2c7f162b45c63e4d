"""Records of operands that kernels of products take whole. What is missing is None, which a kernel sees when it is
compiled. No field is named `values`, `type`, `count` or `index`: Triton's tuples have these names already."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from bankfull.ops.products.body import Unnormed
from bankfull.ops.shapes import check_linear


class ProductInput(NamedTuple):
    """Rows before a product, and what is done to them first."""

    x: Tensor
    stride: int
    """Elements from a row to the next one."""
    delta: Tensor | None = None
    """A residual branch that is added."""
    delta_stride: int | None = None
    joined: Tensor | None = None
    """Room for the sums."""
    gain: Tensor | None = None
    """The weight of the norm of the sums; None if there is neither branch nor norm."""
    eps: float | None = None
    offset: float | None = None
    """A number that is added to the norm's weight; None if it is zero."""

    @classmethod
    def of(cls, x: Tensor | Unnormed) -> ProductInput:
        """Rows whose elements are made adjacent."""
        if not isinstance(x, Unnormed):
            rows = _adjacent(x)
            return cls(rows, rows.stride(0))
        rows, delta = _adjacent(x.x), _adjacent(x.delta)
        strides = rows.stride(0), delta.stride(0)
        return cls(rows, strides[0], delta, strides[1], x.joined, x.weight, x.eps, x.offset or None)


def _adjacent(rows: Tensor) -> Tensor:
    return rows if rows.stride(-1) == 1 else rows.contiguous()


class DenseMatrix(NamedTuple):
    """A dense weight."""

    data: Tensor
    stride: int
    """Elements from a row to the next one."""


class Kept(NamedTuple):
    """Columns of the activations that are not rounded, and those of the weight which they are multiplied by. Their
    number is `width`, a power of two of at least 16: the last ones may be zeros."""

    columns: Tensor
    """int32 (width,): their numbers; -1 for none."""
    weights: Tensor
    """bfloat16 (outputs, width); codes in these columns are zero."""
    marks: Tensor
    """uint8 (columns,): 1 where a byte of the weight's rows is in one of them."""

    @property
    def width(self) -> int:
        return len(self.columns)


class ProductOutput(NamedTuple):
    """Where a product goes, and what is added to it."""

    bias: Tensor | None
    y: Tensor
    indices: Tensor | None = None
    """Room for the index of the highest number of each program, which then stores only that one."""


class Tile(NamedTuple):
    """Compile-time shape of a program's work."""

    rows: int
    out: int
    """Outputs."""
    depth: int
    """Columns of an iteration; all of them, rounded up to a power of two, where there is only one."""
    stages: int = 1
    """Iterations whose operands are loaded at the same time."""
    splits: int = 1
    """Programs that share the columns of a tile."""


def aligned_rows(x: Tensor, shape: tuple[int, int], bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The operands of a weight of this shape with contiguous rows, aligned for vector loads."""
    check_linear(x, shape, bias)
    return _aligned(x.reshape(-1, shape[1]).contiguous()), None if bias is None else bias.contiguous()


def aligned_unnormed(x: Unnormed) -> Unnormed:
    """The same input, contiguous and aligned."""
    row, delta, weight = (_aligned(part.contiguous()) for part in (x.x, x.delta, x.weight))
    return Unnormed(row, delta, weight, x.eps, x.offset, x.joined)


def _aligned(x: Tensor) -> Tensor:
    """16-bit activations are loaded in vectors of up to 16 bytes."""
    return x.clone() if x.storage_offset() * x.element_size() % 16 else x
