"""The kernels of pointwise operations and of the columns of rows on the tape; see native/tape/forms.py."""

from __future__ import annotations

import torch
from torch import Tensor

from bankfull.ops.native.tape.forms import Outputs, floats, form, is_float
from bankfull.ops.native.tape.instruction import Fixed
from bankfull.ops.native.tape.record import TOKENS, Recorder
from bankfull.ops.pointwise.native import CODES


def _pointwise(
    rec: Recorder,
    y: Tensor,
    code: int | None,
    x: Tensor,
    factor: Tensor | None = None,
    parameter: float = 0.0,
    label: str = "pointwise",
) -> bool:
    places = [rec.dense(x), None if factor is None else rec.dense(factor)]
    if code is None or not is_float(x) or places[0] is None or (factor is not None and places[1] is None):
        return False
    if factor is not None and factor.shape != x.shape:
        return False
    rec.emit(
        "pointwise",
        {"x": places[0], "factor": places[1]},
        {"y": rec.view(y)},
        label=label,
        kind=code,
        per_token=x.numel() // TOKENS,
        parameter=parameter,
    )
    return True


@form
def activate(rec: Recorder, out: Outputs, x: Tensor, kind: str) -> bool:
    return _pointwise(rec, out[0], CODES.get(kind), x)


@form
def activate_mul(rec: Recorder, out: Outputs, gate: Tensor, up: Tensor, kind: str) -> bool:
    return _pointwise(rec, out[0], CODES.get(kind), gate, up)


@form
def soft_cap(rec: Recorder, out: Outputs, x: Tensor, cap: float) -> bool:
    return _pointwise(rec, out[0], CODES["soft_cap"], x, parameter=cap)


@form
def add(rec: Recorder, out: Outputs, x: Tensor, delta: Tensor) -> bool:
    return is_float(delta) and _pointwise(rec, out[0], CODES["plus"], x, delta, label="add")


@form
def scale_columns(rec: Recorder, out: Outputs, x: Tensor, factors: Tensor) -> bool:
    """The same rows and factors share one instruction: weights with one input and the same outlier columns."""
    if not is_float(x) or x.dim() != 2:
        return False
    place = rec.view(x)
    key = "scale", place, factors.to(torch.float32).numpy().tobytes()
    if (known := rec.shared.get(key)) is not None:
        rec.is_value(out[0], known)
        return True
    scaled = rec.shared[key] = rec.view(out[0])
    rec.emit(
        "scale",
        {"x": place, "factors": floats(factors)},
        {"y": scaled},
        columns=x.shape[1],
        x_token=place.stride // 4,
    )
    return True


@form
def gather_columns(rec: Recorder, out: Outputs, x: Tensor, columns: Tensor) -> bool:
    """Weights that read the same rows in the same order share one instruction: queries, keys and values."""
    if not is_float(x) or x.dim() != 2:
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
