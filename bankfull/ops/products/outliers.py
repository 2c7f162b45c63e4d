"""Linear layers with outlier columns (LLM.int8()): a few columns of the activations are kept, the rest are int8.

The weight of these operations is int8 by row, with `QTensor.outliers` beside it."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import linear

from bankfull.ops.cost import Cost
from bankfull.ops.norm.body import wide
from bankfull.ops.products.body import product, quantized_rows
from bankfull.weights.qtensor import Outliers, QTensor


def outliers_of(weight: QTensor) -> Outliers:
    assert weight.outliers is not None, "the weight has no outlier columns beside it"
    return weight.outliers


def _counted(cost: Cost, x: Tensor, weight: QTensor) -> Cost:
    """With what the outlier columns add to the product with the other ones; the weight's bytes contain theirs."""
    rows = x.numel() // x.shape[-1]
    return cost.on("int8") + Cost(2.0 * rows * outliers_of(weight)[1].numel())


@product(_counted)
def linear_outliers(x: Tensor, weight: QTensor, bias: Tensor | None) -> Tensor:
    """x @ W.T + bias. The outlier columns of x are multiplied by those of W in bfloat16, without rounding; the others
    are rounded to int8 with one scale per row, and multiplied by W's codes. A kernel may round activations less.
    Columns are fixed, so a row does not depend on the batch."""
    columns, kept = outliers_of(weight)
    rest = quantized_rows(wide(x.index_fill(-1, columns, 0))).to(x.dtype)
    outliers = linear(x.index_select(-1, columns), kept.to(x.dtype), bias)
    return linear(rest, weight.as_stored.dequantize(x.dtype)) + outliers
