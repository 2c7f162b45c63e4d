"""Linear layers with outlier columns on a GPU: 8-bit weights times 8-bit activations (`w8a8`); its kernels add the
outlier columns. A single row keeps its activations, as there.

Everything is enqueued, and no size depends on the activations, so a step can be captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bankfull.ops.products.body import PLAIN, Epilogue, Unnormed
from bankfull.ops.products.outliers import linear_outliers, outliers_of
from bankfull.ops.products.triton import w8a8
from bankfull.ops.products.triton.linear import finished
from bankfull.ops.products.triton.operands import Kept, aligned_rows, aligned_unnormed
from bankfull.ops.products.triton.quantized import linear as quantized
from bankfull.ops.products.triton.quantized import persistent as quantized_persistent
from bankfull.ops.products.triton.quantized.layout import LAYOUTS, WordWeight, repack
from bankfull.ops.products.triton.quantized.persistent import one_row
from bankfull.ops.products.triton.quantized.rows import few_rows
from bankfull.ops.products.triton.w8a8 import round_rows
from bankfull.ops.shapes import check_linear
from bankfull.ops.triton.launch import power_of_two
from bankfull.weights.formats.rows import INT8_ROW
from bankfull.weights.qtensor import QTensor

LEAST_WIDTH = 16
"""Columns that tensor cores multiply at once."""


@dataclass(frozen=True, slots=True)
class OutlierWeight:
    words: WordWeight
    """Zero in the outlier columns."""
    columns: Tensor
    values: Tensor
    """The outlier columns: numbers (n,), int64, and weights (outputs, n)."""
    rounds: bool
    """Whether activations in 16 bits are rounded to int8 for it, by kernels that know outliers."""
    kept: Kept | None
    """The outlier columns for these kernels; None if there are none."""


def _rounds(weight: QTensor, dtype: torch.dtype | None = torch.bfloat16) -> bool:
    return weight.scheme.name == INT8_ROW and w8a8.accepts_w8a8(dtype=dtype, weight=weight)


def _width(count: int) -> int:
    return max(LEAST_WIDTH, power_of_two(count))


def _prepare(weight: QTensor) -> OutlierWeight:
    columns, values = outliers_of(weight)
    stored = weight.as_stored
    if not _rounds(stored) or not len(columns):
        return OutlierWeight(repack(stored), columns, values, _rounds(stored), None)
    # A file may have any codes in the outlier columns. The kernels of a single row multiply them.
    parts = {**stored.parts, "codes": stored.parts["codes"].index_fill(-1, columns, 0)}
    words = repack(QTensor(stored.scheme, parts, stored.shape))
    more = _width(len(columns)) - len(columns)
    numbers = torch.nn.functional.pad(columns.to(torch.int32), (0, more), value=-1)
    padded = torch.nn.functional.pad(values.to(torch.bfloat16), (0, more)).contiguous()
    is_outlier = torch.zeros(stored.shape[1], dtype=torch.uint8, device=columns.device).index_fill(0, columns, 1)
    marks = is_outlier.index_select(0, _stored_columns(words, columns.device))
    return OutlierWeight(words, columns, values, True, Kept(numbers, padded, marks))


def _stored_columns(weight: WordWeight, device: torch.device) -> Tensor:
    """The column of each byte of a row (`w8a8_kernels.stored_column`)."""
    position = torch.arange(weight.shape[1], device=device)
    inside = position % weight.form.group
    word, byte = inside // 4, inside % 4
    return position - inside + 2 * ((byte % 2) * (weight.form.group // 4) + word) + byte // 2


def _accepts(
    *,
    dtype: torch.dtype | None = None,
    weight: QTensor | None = None,
    normed: bool = False,
    gated: bool = False,
    **facts: Any,
) -> bool:
    if weight is None or not quantized.accepts_quantized(dtype=dtype, weight=weight):
        return False
    if not normed:
        return not (gated and weight.shape[0] % 2)
    if not _rounds(weight, dtype) or (gated and weight.shape[0] % 32):
        return False
    columns = weight.shape[1]
    fits = _width(len(outliers_of(weight)[0])) <= quantized_persistent.most_kept(columns)
    return fits and quantized_persistent.supports(LAYOUTS[INT8_ROW][0], columns, dtype)


def _apart(x: Tensor, weight: OutlierWeight, bias: Tensor | None) -> Tensor:
    """The outputs by two products, for what is not rounded by kernels that know outliers."""
    if not len(weight.columns):
        return quantized.run_linear(x, weight.words, Epilogue(bias))
    y = quantized.run_linear(x.index_fill(-1, weight.columns, 0), weight.words, Epilogue(bias))
    return torch.addmm(y, x.index_select(-1, weight.columns), weight.values.to(x.dtype).T)


def _one_row(x: Tensor, weight: OutlierWeight, epilogue: Epilogue) -> Tensor:
    row, shift = aligned_rows(x, weight.words.shape, epilogue.bias)
    words, width = weight.words, 0 if weight.kept is None else weight.kept.width
    fastest = quantized_persistent.is_fastest(words.form, words.shape[1], x.dtype)
    if fastest and width <= quantized_persistent.most_kept(words.shape[1]):
        return one_row(row, words, shift, epilogue.gate, kept=weight.kept)
    return few_rows(row, words, shift, epilogue.gate, kept=weight.kept)


@linear_outliers.provider(
    quantized.NAME, on="cuda", accepts=_accepts, prepare=_prepare, fuses=("gated", "normed", "normed_gated")
)
def run_linear_outliers(x: Tensor | Unnormed, weight: OutlierWeight, epilogue: Epilogue = PLAIN) -> Tensor:
    words, kept = weight.words, weight.kept
    if isinstance(x, Unnormed):
        if len(x.x) == 1:
            return one_row(aligned_unnormed(x), words, epilogue.bias, epilogue.gate, kept=kept)
        return w8a8.whole_product(round_rows(x, words, kept), words, epilogue, x.x.dtype)
    check_linear(x, words.shape, epilogue.bias)
    rows = x.reshape(-1, x.shape[-1])
    if not weight.rounds or x.element_size() != 2 or not x.numel():
        y = finished(_apart(rows, weight, epilogue.bias), epilogue)
    elif len(rows) == 1:
        y = _one_row(rows, weight, epilogue)
    else:
        y = w8a8.whole_product(round_rows(rows, words, kept), words, epilogue, x.dtype)
    return y.reshape(*x.shape[:-1], *y.shape[1:])
