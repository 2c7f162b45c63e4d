"""Stacked weights of experts on a GPU: dense, or codes that kernels dequantize in registers."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from bankfull.weights.formats.groups import KINDS
from bankfull.weights.formats.rows import FP8, INT8_ROW
from bankfull.weights.qtensor import QTensor

DENSE, BY_ROW, GROUPS8, GROUPS4 = range(4)
"""Dense values; codes with one scale per output; int8 and int4 codes with one scale per group of columns."""


@dataclass(frozen=True, slots=True)
class ExpertWeight:
    """Stacked matrices (experts, outputs, columns)."""

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


def form_of(weight: QTensor) -> int | None:
    """How kernels read the weight; None = they cannot."""
    name = weight.scheme.name
    if weight.is_dense:
        return DENSE
    if name in (INT8_ROW, FP8):
        return BY_ROW
    if name.startswith(KINDS):
        return GROUPS8 if name.startswith("int8") else GROUPS4
    return None


def prepare(weight: QTensor) -> ExpertWeight:
    form, (experts, outputs, columns) = form_of(weight), weight.shape
    assert form is not None, "accepted formats have a form"
    parts = {name: part.contiguous() for name, part in weight.parts.items()}
    if form == DENSE:
        return ExpertWeight(parts["data"], parts["data"], form, 1, (experts, outputs, columns))
    group = 1 if form == BY_ROW else weight.scheme.block
    return ExpertWeight(parts["codes"], parts["scales"], form, group, (experts, outputs, columns))


@triton.jit
def weight_tile(
    data, scales, row, column, columns, inside, FORM: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr
):
    """Weights of outputs `row` (int64, counted over all experts) and columns `column`, in KIND; one of the two is a row
    vector, the other a column vector. With one scale per output these are codes: the caller scales its sums."""
    if FORM == 3:
        packed = tl.load(data + row * (columns // 2) + column // 2, mask=inside, other=0)
        code = ((packed >> ((column % 2) * 4).to(tl.uint8)) & 15).to(tl.float32) - 8.0
    else:
        code = tl.load(data + row * columns + column, mask=inside, other=0.0)
    if FORM >= 2:
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
