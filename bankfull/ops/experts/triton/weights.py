"""Stacked weights of experts on a GPU: dense, 8-bit codes as they are stored, or every other format in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.products.triton.quantized.layout import WordWeight, has_layout, repack
from bankfull.weights.formats.fp8_groups import FP8_G128
from bankfull.weights.formats.groups import GROUPS, name_of
from bankfull.weights.formats.rows import FP8, INT8_ROW
from bankfull.weights.qtensor import QTensor

DENSE, BY_ROW, GROUPED, IN_WORDS = range(4)
"""Dense values; 8-bit codes with one scale per output, or per group of columns; words (`quantized_layout`)."""
CODES = {INT8_ROW: BY_ROW, FP8: BY_ROW, FP8_G128: GROUPED, **{name_of("int8", group): GROUPED for group in GROUPS}}


class Stack(NamedTuple):
    """Stacked matrices as kernels take them."""

    data: Tensor
    scales: Tensor | None
    bias: Tensor | None


class ExpertTile(NamedTuple):
    """What is constant in a kernel over stacked matrices."""

    per_token: int
    """Experts of a token."""
    rows: int
    """Rows of a tile; experts of a token that are read at once."""
    outputs: int
    depth: int
    """Columns of an iteration."""
    form: int
    group: int
    kind: str = ""
    """Activation of the gate; empty: there is but one matrix."""
    stages: int = 1


@dataclass(frozen=True, slots=True)
class ExpertWeight:
    """Stacked matrices (experts, outputs, columns): values or bytes."""

    data: Tensor
    scales: Tensor | None
    """Scales of the codes."""
    form: int
    group: int
    shape: tuple[int, int, int]

    @property
    def nbytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in (self.data, self.scales) if part is not None)

    def stack(self, bias: Tensor | None) -> Stack:
        return Stack(self.data, self.scales, bias)


@dataclass(frozen=True, slots=True)
class ExpertWords:
    """Stacked matrices (experts, outputs, columns) in words, as one matrix of all experts' outputs."""

    matrix: WordWeight
    shape: tuple[int, int, int]

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes


Stacked = ExpertWeight | ExpertWords


def form_of(weight: QTensor) -> int | None:
    """How kernels read the weight; None = they cannot."""
    if weight.is_dense:
        return DENSE
    code = CODES.get(weight.scheme.name)
    return IN_WORDS if code is None and has_layout(weight) else code


def prepare(weight: QTensor) -> Stacked:
    form, (experts, outputs, columns) = form_of(weight), weight.shape
    assert form is not None, "accepted formats have a form"
    shape = (experts, outputs, columns)
    if form == IN_WORDS:
        return ExpertWords(repack(weight.reshape_leading(experts * outputs)), shape)
    parts = {name: part.contiguous() for name, part in weight.parts.items()}
    if form == DENSE:
        return ExpertWeight(parts["data"], None, form, 1, shape)
    return ExpertWeight(parts["codes"], parts["scales"], form, 1 if form == BY_ROW else weight.scheme.block, shape)


@triton.jit
def weight_tile(weight, row, column, columns, inside, TILE: tl.constexpr, KIND: tl.constexpr):
    """Weights of outputs `row` (int64, counted over all experts) and columns `column`, in KIND; one of the two is a row
    vector, the other a column vector. With one scale per output these are codes: `finished` scales their sums."""
    code = tl.load(weight.data + row * columns + column, mask=inside, other=0.0)
    if TILE.form == 2:
        at = row * (columns // TILE.group) + column // TILE.group
        scale = tl.load(weight.scales + at, mask=inside, other=0.0).to(tl.float32)
        result = (code.to(tl.float32) * scale).to(KIND)
    elif TILE.form == 1:
        result = code.to(tl.float32).to(KIND)
    else:
        result = code.to(KIND)
    return result


@triton.jit
def along(vector, AXIS: tl.constexpr):
    """The vector as a row (AXIS 0) or a column (1) of one; without an axis the vector itself."""
    return vector if AXIS is None else tl.expand_dims(vector, AXIS)


@triton.jit
def finished(sums, weight, row, exist, AXIS: tl.constexpr, TILE: tl.constexpr):
    """The sums of outputs `row` with their scale and bias; the outputs are `along` AXIS."""
    if TILE.form == 1:
        sums = sums * along(tl.load(weight.scales + row, mask=exist, other=0.0), AXIS)
    if weight.bias is not None:
        sums += along(tl.load(weight.bias + row, mask=exist, other=0.0).to(tl.float32), AXIS)
    return sums
