"""The kernels of RoPE on the tape; see native/tape/forms.py."""

from __future__ import annotations

import torch
from torch import Tensor

from bankfull.ops.native.tape.forms import Outputs, floats, form, is_float
from bankfull.ops.native.tape.record import Recorder


@form
def rope_angles(
    rec: Recorder, out: Outputs, positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype
) -> bool:
    if dtype is not torch.float32 or frequencies.dtype is not torch.float32:
        return False
    rec.emit(
        "angles",
        {"positions": rec.operand(positions), "frequencies": floats(frequencies)},
        {"cos": rec.view(out[0]), "sin": rec.view(out[1])},
        half=frequencies.shape[0],
        scale=scale,
    )
    return True


@form
def rotate(rec: Recorder, out: Outputs, x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    place = rec.dense(x)
    if place is None or not is_float(x):
        return False
    _, heads, size = x.shape
    rec.emit(
        "rotate",
        {"x": place, "cos": rec.view(cos), "sin": rec.view(sin)},
        {"y": rec.view(out[0])},
        heads=heads,
        size=size,
        half=cos.shape[1],
    )
    return True
