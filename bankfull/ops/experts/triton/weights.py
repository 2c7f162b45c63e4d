"""Stacked weights of experts on a GPU: dense, 8-bit codes as they are stored, or every other format in words."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class ExpertWeight:
    """Stacked matrices (experts, outputs, columns): values or bytes."""

    data: Tensor
    scales: Tensor
    """Scales of the codes; `data` itself where there are none."""
    form: int
    group: int
    shape: tuple[int, int, int]

    @property
    def nbytes(self) -> int:
        scales = 0 if self.form == DENSE else self.scales.numel() * self.scales.element_size()
        return self.data.numel() * self.data.element_size() + scales


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
        return ExpertWeight(parts["data"], parts["data"], form, 1, shape)
    return ExpertWeight(parts["codes"], parts["scales"], form, 1 if form == BY_ROW else weight.scheme.block, shape)


@triton.jit
def weight_tile(
    data, scales, row, column, columns, inside, FORM: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr
):
    """Weights of outputs `row` (int64, counted over all experts) and columns `column`, in KIND; one of the two is a row
    vector, the other a column vector. With one scale per output these are codes: the caller scales its sums."""
    code = tl.load(data + row * columns + column, mask=inside, other=0.0)
    if FORM == 2:
        scale = tl.load(scales + row * (columns // GROUP) + column // GROUP, mask=inside, other=0.0).to(tl.float32)
        result = (code.to(tl.float32) * scale).to(KIND)
    elif FORM == 1:
        result = code.to(tl.float32).to(KIND)
    else:
        result = code.to(KIND)
    return result


@triton.jit
def output_scale(scales, row, exist, FORM: tl.constexpr):
    """Factor of the sums of outputs `row`."""
    found = tl.where(exist, 1.0, 1.0)
    if FORM == 1:
        found = tl.load(scales + row, mask=exist, other=0.0)
    return found
