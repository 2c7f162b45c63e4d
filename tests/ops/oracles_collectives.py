"""Independent definitions of collectives in a group whose ranks have equal tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bankfull.weights.qtensor import QTensor
from tests.ops.oracles import Array, embedding, f64, rms_norm


def all_reduce(x: Tensor, group: Any) -> Array:
    return f64(x) * group.size


def gather_outputs(x: Tensor, group: Any, width: int) -> Array:
    return np.concatenate([f64(x)] * group.size, 1)[:, :width]


def gather_rows(x: Tensor, group: Any, rows: int) -> Array:
    return np.concatenate([f64(x)] * group.size)[:rows]


def reduce_scatter(x: Tensor, group: Any) -> Array:
    each = -(-len(x) // group.size)
    padded = np.zeros((each * group.size, x.shape[1]))
    padded[: len(x)] = f64(x) * group.size
    return padded[group.index * each : (group.index + 1) * each]


def spread_embedding(ids: Tensor, table: QTensor, dtype: torch.dtype, scale: float, first: int, group: Any) -> Array:
    found = np.zeros((len(ids), table.shape[1]))
    for place, number in enumerate((ids - first).tolist()):
        if 0 <= number < table.shape[0]:
            found[place] = embedding(torch.tensor([number]), table, dtype, scale)[0] * group.size
    return found


def spread_rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, group: Any) -> Array:
    return rms_norm(x, weight, eps, offset)


ORACLES: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (all_reduce, gather_outputs, gather_rows, reduce_scatter, spread_embedding, spread_rms_norm)
}
