"""The kernels of linear attention and of the delta rule."""

from __future__ import annotations

from torch import Tensor

from bankfull.ops.native.linear_attention import taylor_factors
from bankfull.ops.native.tape.forms import Outputs, _floats, _is_float, _recurrent, form
from bankfull.ops.native.tape.instruction import Fixed
from bankfull.ops.native.tape.record import Recorder
from bankfull.ops.reference.ssm import RecurrentMeta


@form
def taylor_features(rec: Recorder, out: Outputs, x: Tensor) -> bool:
    if not _is_float(x):
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
    if not _is_float(q, k, v, *states) or not all(part.is_contiguous() for part in states):
        return False
    queries, keys, values = rec.view(q), rec.view(k), rec.view(v)
    rec.emit(
        "linear_attention",
        {"q": queries, "k": keys, "v": values, "slopes": _floats(slopes), **_recurrent(rec, meta)},
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
    if not _is_float(q, k, v, a, b, state) or not state.is_contiguous():
        return False
    parts = {name: rec.view(part) for name, part in (("q", q), ("k", k), ("v", v), ("a", a), ("b", b))}
    rec.emit(
        "delta_rule",
        {**parts, "rate": _floats(rate), "shift": _floats(shift), **_recurrent(rec, meta)},
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
