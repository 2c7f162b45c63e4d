"""Linear layers with outlier columns (LLM.int8()): a few columns of the activations are kept, the rest are int8.

The weight of these operations is int8 by row, with `QTensor.outliers` beside it."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import linear as product

from bankfull.ops.cost import Cost
from bankfull.ops.norm.body import wide
from bankfull.ops.products.body import gated_cost, gated_of, linear_cost, linear_shape, normed_of, quantized_rows
from bankfull.ops.registry import op
from bankfull.weights.qtensor import Outliers, QTensor


def outliers_of(weight: QTensor) -> Outliers:
    assert weight.outliers is not None, "the weight has no outlier columns beside it"
    return weight.outliers


def _more(rows: int, weight: QTensor) -> Cost:
    """What the outlier columns add to the product with the other ones; the weight's bytes contain theirs."""
    return Cost(2.0 * rows * outliers_of(weight)[1].numel())


def _linear_cost(x: Tensor, weight: QTensor, bias: Tensor | None = None) -> Cost:
    return linear_cost(x, weight, bias).on("int8") + _more(x.numel() // x.shape[-1], weight)


def _gated_cost(x: Tensor, weight: QTensor, bias: Tensor | None, kind: str) -> Cost:
    return gated_cost(x, weight, bias, kind).on("int8") + _more(x.numel() // x.shape[-1], weight)


@op(cost=_linear_cost, shape=linear_shape)
def linear_outliers(x: Tensor, weight: QTensor, bias: Tensor | None = None) -> Tensor:
    """x @ W.T + bias. The outlier columns of x are multiplied by those of W in bfloat16, without rounding; the others
    are rounded to int8 with one scale per row, and multiplied by W's codes. A kernel may round activations less.
    Columns are fixed, so a row does not depend on the batch."""
    columns, kept = outliers_of(weight)
    rest = quantized_rows(wide(x.index_fill(-1, columns, 0))).to(x.dtype)
    outliers = product(x.index_select(-1, columns), kept.to(x.dtype), bias)
    return product(rest, weight.as_stored.dequantize(x.dtype)) + outliers


gated_linear_outliers = gated_of(linear_outliers, _gated_cost)
normed_linear_outliers, normed_gated_linear_outliers = map(normed_of, (linear_outliers, gated_linear_outliers))
"""The norm rounds the activations in the same pass."""
