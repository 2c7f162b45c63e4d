"""Products with outlier columns, in numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bankfull.ops import Unnormed
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


def gated_linear_outliers(x: Tensor, weight: QTensor, bias: Tensor | None, kind: str) -> Array:
    gate, up = (torch.from_numpy(half).to(x.dtype) for half in np.split(linear_outliers(x, weight, bias), 2, -1))
    return oracles.activate_mul(gate, up, kind)


def normed_linear_outliers(x: Unnormed, weight: QTensor, bias: Tensor | None = None) -> Array:
    return linear_outliers(oracles.read(x), weight, bias)


def normed_gated_linear_outliers(x: Unnormed, weight: QTensor, bias: Tensor | None, kind: str) -> Array:
    return gated_linear_outliers(oracles.read(x), weight, bias, kind)


ORACLES: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        linear_outliers,
        gated_linear_outliers,
        normed_linear_outliers,
        normed_gated_linear_outliers,
    )
}
