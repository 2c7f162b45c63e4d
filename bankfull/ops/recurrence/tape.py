"""The kernels of recurrences and of linear attention on the tape; see native/tape/forms.py."""

from __future__ import annotations

from torch import Tensor

from bankfull.ops.native.tape.forms import Outputs, floats, form, is_float
from bankfull.ops.native.tape.instruction import Fixed, Operand
from bankfull.ops.native.tape.record import Recorder
from bankfull.ops.recurrence.native.linear_attention import taylor_factors
from bankfull.ops.recurrence.ssd import Limits
from bankfull.ops.recurrence.ssm import RecurrentMeta


def _recurrent(rec: Recorder, meta: RecurrentMeta) -> dict[str, Operand | None]:
    return {
        "q_start": rec.operand(meta.q_start),
        "kept": rec.operand(meta.kept),
        "read": rec.operand(meta.read),
        "write": rec.operand(meta.write),
    }


def _convolve(
    rec: Recorder,
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    meta: RecurrentMeta,
    silu: bool,
) -> bool:
    if not is_float(x, state) or not state.is_contiguous():
        return False
    place = rec.view(x)
    rec.emit(
        "conv",
        {"x": place, "weight": floats(weight), "bias": floats(bias), **_recurrent(rec, meta)},
        {"y": rec.view(y), "state": Fixed(state)},
        slots=state.shape[0],
        channels=x.shape[1],
        width=weight.shape[1],
        x_token=place.stride // 4,
        silu=silu,
    )
    return True


@form
def causal_conv(
    rec: Recorder, out: Outputs, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, meta: RecurrentMeta
) -> bool:
    return _convolve(rec, out[0], x, weight, bias, state, meta, False)


@form
def causal_conv_silu(
    rec: Recorder, out: Outputs, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, meta: RecurrentMeta
) -> bool:
    return _convolve(rec, out[0], x, weight, bias, state, meta, True)


@form
def selective_scan(
    rec: Recorder,
    out: Outputs,
    x: Tensor,
    delta: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    state: Tensor,
    meta: RecurrentMeta,
) -> bool:
    places = [rec.dense(x), rec.dense(delta)]
    if None in places or not is_float(x, delta, b, c, state) or not state.is_contiguous():
        return False
    into, read_out = rec.view(b), rec.view(c)
    reads = {
        "x": places[0],
        "delta": places[1],
        "a": floats(a),
        "b": into,
        "c": read_out,
        "d": floats(d),
        **_recurrent(rec, meta),
    }
    rec.emit(
        "scan",
        reads,
        {"y": rec.view(out[0]), "state": Fixed(state)},
        slots=state.shape[0],
        channels=x.shape[1],
        size=a.shape[1],
        b_token=into.stride // 4,
        c_token=read_out.stride // 4,
    )
    return True


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
    if not is_float(x, dt, b, c, state) or not state.is_contiguous():
        return False
    rows, steps, into, read_out = rec.view(x), rec.view(dt), rec.view(b), rec.view(c)
    rec.emit(
        "ssd",
        {
            "x": rows,
            "dt": steps,
            "a": floats(a),
            "b": into,
            "c": read_out,
            "d": floats(d),
            "bias": floats(bias),
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
    if place is None or not is_float(x, gate):
        return False
    opening = rec.view(gate)
    rec.emit(
        "gated_norm",
        {"x": place, "gate": opening, "weight": floats(weight)},
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
    if not is_float(x, state) or not state.is_contiguous():
        return False
    place = rec.view(x)
    rec.emit(
        "diagonal",
        {"x": place, "decay": floats(decay), "out": floats(leave), "d": floats(d), **_recurrent(rec, meta)},
        {"y": rec.view(out[0]), "state": Fixed(state)},
        slots=state.shape[0],
        channels=x.shape[1],
        pairs=decay.shape[1],
        x_token=place.stride // 4,
    )
    return True


@form
def taylor_features(rec: Recorder, out: Outputs, x: Tensor) -> bool:
    if not is_float(x):
        return False
    place = rec.view(x)
    single, pair = taylor_factors(x.shape[2])
    rec.emit(
        "taylor_features",
        {"x": place},
        {"y": rec.view(out[0])},
        heads=x.shape[1],
        size=x.shape[2],
        x_token=place.stride // 4,
        single=single,
        pair=pair,
    )
    return True


@form
def linear_attention(
    rec: Recorder,
    out: Outputs,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    state: Tensor,
    normalizer: Tensor | None,
    meta: RecurrentMeta,
) -> bool:
    states = [state] if normalizer is None else [state, normalizer]
    if not is_float(q, k, v, *states) or not all(part.is_contiguous() for part in states):
        return False
    queries, keys, values = rec.view(q), rec.view(k), rec.view(v)
    rec.emit(
        "linear_attention",
        {"q": queries, "k": keys, "v": values, "slopes": floats(slopes), **_recurrent(rec, meta)},
        {
            "y": rec.view(out[0]),
            "state": Fixed(state),
            "normalizer": None if normalizer is None else Fixed(normalizer),
        },
        slots=state.shape[0],
        heads=q.shape[1],
        key=q.shape[2],
        value=v.shape[2],
        q_token=queries.stride // 4,
        k_token=keys.stride // 4,
        v_token=values.stride // 4,
    )
    return True


@form
def delta_rule(
    rec: Recorder,
    out: Outputs,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    rate: Tensor,
    shift: Tensor,
    state: Tensor,
    meta: RecurrentMeta,
) -> bool:
    if not is_float(q, k, v, a, b, state) or not state.is_contiguous():
        return False
    parts = {name: rec.view(part) for name, part in (("q", q), ("k", k), ("v", v), ("a", a), ("b", b))}
    rec.emit(
        "delta_rule",
        {**parts, "rate": floats(rate), "shift": floats(shift), **_recurrent(rec, meta)},
        {"y": rec.view(out[0]), "state": Fixed(state)},
        slots=state.shape[0],
        key_heads=q.shape[1],
        heads=v.shape[1],
        key=q.shape[2],
        value=v.shape[2],
        q_token=parts["q"].stride // 4,
        k_token=parts["k"].stride // 4,
        v_token=parts["v"].stride // 4,
        a_token=parts["a"].stride // 4,
        b_token=parts["b"].stride // 4,
    )
    return True
