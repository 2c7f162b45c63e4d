"""The kernels of norms on the tape; see native/tape/forms.py."""

from __future__ import annotations

from torch import Tensor

from bankfull.ops.native.tape.forms import Outputs, floats, form, is_float
from bankfull.ops.native.tape.record import TOKENS, Recorder


def _norm(
    rec: Recorder,
    x: Tensor,
    delta: Tensor | None,
    joined: Tensor | None,
    y: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
) -> bool:
    places = [None if t is None else rec.dense(t) for t in (x, delta, joined, y)]
    if places[0] is None or (delta is not None and places[1] is None) or not is_float(x):
        return False
    rec.emit(
        "norm",
        {"x": places[0], "delta": places[1], "weight": floats(weight)},
        {"joined": places[2], "y": places[3], "encoded": None},
        per_token=x.numel() // TOKENS // weight.shape[0],
        columns=weight.shape[0],
        eps=eps,
        offset=offset,
    )
    return True


@form
def rms_norm(rec: Recorder, out: Outputs, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> bool:
    return _norm(rec, x, None, None, out[0], weight, eps, offset)


@form
def add_rms_norm(
    rec: Recorder, out: Outputs, x: Tensor, delta: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> bool:
    return _norm(rec, x, delta, out[0], out[1], weight, eps, offset)


@form
def layer_norm(rec: Recorder, out: Outputs, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> bool:
    place = rec.dense(x)
    if place is None or not is_float(x):
        return False
    columns = weight.shape[0]
    rec.emit(
        "layer_norm",
        {"x": place, "weight": floats(weight), "bias": floats(bias)},
        {"y": rec.view(out[0])},
        per_token=x.numel() // TOKENS // columns,
        columns=columns,
        eps=eps,
    )
    return True
