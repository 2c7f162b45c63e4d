"""Products with outlier columns, in numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bankfull.weights.qtensor import QTensor
from tests.ops import oracles
from tests.ops.oracles import Array, f64


def linear_outliers(x: Tensor, weight: QTensor, bias: Tensor | None = None) -> Array:
    assert weight.outliers is not None
    columns, kept = weight.outliers[0].numpy(), weight.outliers[1]
    rows = x.numpy().copy() if x.dtype == torch.float64 else x.to(torch.float32).numpy().copy()
    own = rows[..., columns].astype(np.float64)
    rows[..., columns] = 0
    largest = abs(rows).max(-1, keepdims=True)
    step = rows.dtype.type(127) / np.where(largest > 0, largest, 1)
    codes = f64(torch.from_numpy(np.rint(rows * step) * (largest / rows.dtype.type(127))).to(x.dtype))
    rest = codes @ f64(weight.as_stored.dequantize(x.dtype)).T
    return rest + own @ f64(kept).T + (0 if bias is None else f64(bias))


ORACLES: dict[str, Callable[..., Any]] = {"linear_outliers": oracles.with_epilogue(linear_outliers)}
