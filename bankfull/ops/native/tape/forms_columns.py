"""The kernels of operations on the columns of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from bankfull.ops.native.tape.forms import Outputs, _floats, _is_float, form
from bankfull.ops.native.tape.instruction import Fixed
from bankfull.ops.native.tape.record import Recorder


@form
def scale_columns(rec: Recorder, out: Outputs, x: Tensor, factors: Tensor) -> bool:
    """The same rows and factors share one instruction: weights with one input and the same outlier columns."""
    if not _is_float(x) or x.dim() != 2:
        return False
    place = rec.view(x)
    key = "scale", place, factors.to(torch.float32).numpy().tobytes()
    if (known := rec.shared.get(key)) is not None:
        rec.is_value(out[0], known)
        return True
    scaled = rec.shared[key] = rec.view(out[0])
    rec.emit(
        "scale",
        {"x": place, "factors": _floats(factors)},
        {"y": scaled},
        columns=x.shape[1],
        x_token=place.stride // 4,
    )
    return True


@form
def gather_columns(rec: Recorder, out: Outputs, x: Tensor, columns: Tensor) -> bool:
    """Weights that read the same rows in the same order share one instruction: queries, keys and values."""
    if not _is_float(x) or x.dim() != 2:
        return False
    place = rec.view(x)
    key = "gather", place, columns.numpy().tobytes()
    if (known := rec.shared.get(key)) is not None:
        rec.is_value(out[0], known)
        return True
    gathered = rec.shared[key] = rec.view(out[0])
    rec.emit(
        "gather",
        {"x": place, "columns": Fixed(columns)},
        {"y": gathered},
        count=len(columns),
        inner=x.shape[1],
        x_token=place.stride // 4,
    )
    return True
