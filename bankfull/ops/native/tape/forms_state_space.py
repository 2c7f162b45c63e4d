"""The kernels of Mamba-2 and S4."""

from __future__ import annotations

from torch import Tensor

from bankfull.ops.native.tape.forms import Outputs, _floats, _is_float, _recurrent, form
from bankfull.ops.native.tape.instruction import Fixed
from bankfull.ops.native.tape.record import Recorder
from bankfull.ops.reference.ssd import Limits
from bankfull.ops.reference.ssm import RecurrentMeta


@form
def ssd_scan(
    rec: Recorder,
    out: Outputs,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    bias: Tensor,
    limits: Limits,
    state: Tensor,
    meta: RecurrentMeta,
) -> bool:
    if not _is_float(x, dt, b, c, state) or not state.is_contiguous():
        return False
    rows, steps, into, read_out = rec.view(x), rec.view(dt), rec.view(b), rec.view(c)
    rec.emit(
        "ssd",
        {
            "x": rows,
            "dt": steps,
            "a": _floats(a),
            "b": into,
            "c": read_out,
            "d": _floats(d),
            "bias": _floats(bias),
            **_recurrent(rec, meta),
        },
        {"y": rec.view(out[0]), "state": Fixed(state)},
        slots=state.shape[0],
        heads=x.shape[1],
        size=x.shape[2],
        n=b.shape[2],
        groups=b.shape[1],
        x_token=rows.stride // 4,
        dt_token=steps.stride // 4,
        b_token=into.stride // 4,
        c_token=read_out.stride // 4,
        low=limits[0],
        high=limits[1],
    )
    return True


@form
def gated_rms_norm(
    rec: Recorder, out: Outputs, x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int, before: bool
) -> bool:
    place = rec.dense(x)
    if place is None or not _is_float(x, gate):
        return False
    opening = rec.view(gate)
    rec.emit(
        "gated_norm",
        {"x": place, "gate": opening, "weight": _floats(weight)},
        {"y": rec.view(out[0])},
        columns=weight.shape[0],
        groups=groups,
        gate_token=opening.stride // 4,
        eps=eps,
        before=before,
    )
    return True


@form
def diagonal_scan(
    rec: Recorder,
    out: Outputs,
    x: Tensor,
    decay: Tensor,
    leave: Tensor,
    d: Tensor,
    state: Tensor,
    meta: RecurrentMeta,
) -> bool:
    if not _is_float(x, state) or not state.is_contiguous():
        return False
    place = rec.view(x)
    rec.emit(
        "diagonal",
        {"x": place, "decay": _floats(decay), "out": _floats(leave), "d": _floats(d), **_recurrent(rec, meta)},
        {"y": rec.view(out[0]), "state": Fixed(state)},
        slots=state.shape[0],
        channels=x.shape[1],
        pairs=decay.shape[1],
        x_token=place.stride // 4,
    )
    return True
