"""Linear layers with outlier columns (LLM.int8()): a few columns of the activations are kept, the rest are int8."""

from __future__ import annotations

import torch
from torch import Tensor

from bankfull.ops.cost import Cost, nbytes
from bankfull.ops.reference.linear import quantized_rows
from bankfull.ops.reference.norm import wide
from bankfull.ops.registry import op
from bankfull.weights.qtensor import QTensor


def _cost(x: Tensor, weight: QTensor, columns: Tensor, kept: Tensor, bias: Tensor | None = None) -> Cost:
    rows = x.numel() // x.shape[-1]
    out, inner = weight.shape
    product = Cost(2.0 * rows * out * inner).on("int8")
    moved = nbytes(x, weight, columns, kept, bias), rows * out * x.element_size()
    return product + Cost(2.0 * rows * out * kept.shape[1], *moved)


def _shape(x: Tensor, weight: QTensor, columns: Tensor, kept: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@op(cost=_cost, shape=_shape)
def linear_outliers(x: Tensor, weight: QTensor, columns: Tensor, kept: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ W.T + bias. The `columns` (n, int64) of x are multiplied by `kept` (out, n), the columns of W in bfloat16,
    without rounding; the others are rounded to int8 with one scale per row, and multiplied by `weight`, whose `columns`
    are 0. A kernel may round activations less. Columns are fixed, so a row does not depend on the batch."""
    rest = quantized_rows(wide(x.index_fill(-1, columns, 0))).to(x.dtype)
    outliers = torch.nn.functional.linear(x.index_select(-1, columns), kept.to(x.dtype), bias)
    return torch.nn.functional.linear(rest, weight.dequantize(x.dtype)) + outliers
