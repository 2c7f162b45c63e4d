"""The embedding in a pass with gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bankfull.ops.products.body import embedding
from bankfull.ops.registry import ANYWHERE, TRAIN
from bankfull.weights.qtensor import QTensor


def _is_dense(weight: QTensor | None = None, **facts: Any) -> bool:
    return weight is not None and weight.is_dense


@embedding.provider(TRAIN, on=ANYWHERE, accepts=_is_dense)
def looked_up(ids: Tensor, table: QTensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """A GPU adds up the gradients of a row in a fixed order here, which it does not for `index_select`."""
    rows = functional.embedding(ids, table.dequantize(dtype))
    return rows if scale == 1.0 else rows * scale
