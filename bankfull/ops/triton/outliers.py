"""Linear layers with outlier columns on a GPU: the product with the int8 weight, and a small dense one added to it.

Everything is enqueued, and no size depends on the activations, so a step can be captured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bankfull.ops.reference.outliers import linear_outliers
from bankfull.ops.triton import quantized, w8a8
from bankfull.ops.triton.quantized_layout import WordWeight, repack
from bankfull.weights.qtensor import QTensor


@dataclass(frozen=True, slots=True)
class OutlierWeight:
    words: WordWeight
    rounds: bool
    """Whether activations in 16 bits are rounded to int8 for it."""


def _prepare(weight: QTensor) -> OutlierWeight:
    return OutlierWeight(repack(weight), w8a8.accepts_w8a8(dtype=torch.bfloat16, weight=weight))


@linear_outliers.provider(quantized.NAME, on="cuda", accepts=quantized.accepts_quantized, prepare=_prepare)
def run_linear_outliers(
    x: Tensor, weight: OutlierWeight, columns: Tensor, kept: Tensor, bias: Tensor | None = None
) -> Tensor:
    product = w8a8.run_linear if weight.rounds and x.element_size() == 2 else quantized.run_linear
    if not len(columns):
        return product(x, weight.words, bias)
    y = product(x.index_fill(-1, columns, 0), weight.words, bias)
    flat = x.reshape(-1, x.shape[-1]).index_select(-1, columns)
    return torch.addmm(y.reshape(len(flat), -1), flat, kept.to(x.dtype).T).reshape(y.shape)
