"""Kernels of routing and mixtures of experts on the tape; see native/tape/forms.py."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bankfull.ops.experts.body import RoutingRule
from bankfull.ops.experts.native import FUNCTIONS, PackedExperts, part_of
from bankfull.ops.native.extension import required
from bankfull.ops.native.tape.forms import Outputs, floats, form, is_float
from bankfull.ops.native.tape.instruction import Fixed, Operand
from bankfull.ops.native.tape.record import Recorder

_native = required()


@form
def route(rec: Recorder, out: Outputs, logits: Tensor, bias: Tensor | None, rule: RoutingRule) -> bool:
    place = rec.dense(logits)
    if place is None or not is_float(logits) or rule.group_best > 2:
        return False
    rec.emit(
        "route",
        {"logits": place, "bias": floats(bias)},
        {"weights": rec.view(out[0]), "chosen": rec.view(out[1])},
        rule=rule.plain,
    )
    return True


def _experts(rec: Recorder, out: Outputs, int8: bool, x: Tensor, chosen: Tensor, weights: Tensor, *others: Any) -> bool:
    *matrices, gate_bias, up_bias, down_bias, kind = others
    place = rec.dense(x)
    if place is None or not is_float(x, weights):
        return False
    experts, inner, hidden = matrices[0].shape
    packed = isinstance(matrices[0], PackedExperts)
    reads: dict[str, Operand | None] = {"x": place, "encoded": None}
    if packed:  # the float rows are not read, and need not exist
        reads = {"x": None, "encoded": rec.encoded(place, hidden, int(_native.encoded_stride(hidden)))}
    reads |= {"chosen": rec.view(chosen), "weights": rec.view(weights)}
    kinds = []
    for name, matrix, bias in zip(("gate", "up", "down"), matrices, (gate_bias, up_bias, down_bias), strict=True):
        storage, each, code = part_of(matrix)
        reads |= {name: Fixed(storage), f"{name}_bias": floats(bias)}
        kinds.append((name, each, code))
    rec.emit(
        "experts",
        reads,
        {"y": rec.view(out[0])},
        matrices=kinds,
        per_token=chosen.shape[1],
        experts=experts,
        hidden=hidden,
        inner=inner,
        function=FUNCTIONS[kind],
        int8=int8,
    )
    return True


@form
def expert_mlp(rec: Recorder, out: Outputs, *args: Any) -> bool:
    return _experts(rec, out, False, *args)


@form
def expert_mlp_int8(rec: Recorder, out: Outputs, *args: Any) -> bool:
    return _experts(rec, out, True, *args)


@form
def expert_mlp_bf16(rec: Recorder, out: Outputs, *args: Any) -> bool:
    return _experts(rec, out, False, *args)


@form
def add_gated(rec: Recorder, out: Outputs, x: Tensor, delta: Tensor, gate: Tensor) -> bool:
    places = [rec.dense(x), rec.dense(delta), rec.dense(gate)]
    if None in places or not is_float(x, delta, gate):
        return False
    rec.emit(
        "add_gated",
        {"x": places[0], "delta": places[1], "gate": places[2]},
        {"y": rec.view(out[0])},
        columns=x.shape[1],
    )
    return True
