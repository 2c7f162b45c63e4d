"""Generated inputs for routing and mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from bankfull.ops import RoutingRule
from bankfull.ops.experts.body import CLAMPED_SWIGLU, SIGMOID, SOFTMAX
from tests.ops.cases import Case, Maker

KINDS = ("silu", "gelu", "gelu_tanh", "relu", CLAMPED_SWIGLU)


def rule_of(make: Maker) -> RoutingRule:
    groups, size = make.pick.choice((1, 1, 2, 3)), make.size(1, 21)
    kept = make.size(1, groups)
    return RoutingRule(
        groups * size,
        make.size(1, min(kept * size, 8)),
        make.pick.choice((SOFTMAX, SIGMOID)),
        bool(make.size(0, 1)),
        make.pick.choice((1.0, 2.5)),
        groups,
        kept,
        make.size(1, min(size, 2)),
    )


def route(make: Maker) -> Case:
    """Logits are far enough apart that rounding does not change the choice, except for those that are equal."""
    rule, tokens = rule_of(make), make.size(1, 40)
    order = torch.rand(tokens, rule.experts, generator=make.numbers).argsort(-1)
    if make.size(0, 1):
        order = order // 2  # pairs of equal logits
    logits = (order * 0.25 - 3).to(make.dtype)
    wide = torch.promote_types(make.dtype, torch.float32)
    bias = make.pick.choice((None, torch.zeros(rule.experts, dtype=wide), make.ids(rule.experts, 3).to(wide)))
    return Case((logits, bias, rule), make.dtype, {"experts": rule.experts})


def add_gated(make: Maker) -> Case:
    shape = make.size(1, 20), make.size(1, 90)
    return Case((make.normal(*shape), make.normal(*shape), make.normal(shape[0], 1)), make.dtype)


def expert_mlp(make: Maker) -> Case:
    scheme = make.scheme()
    if scheme.block == 1:
        hidden, inner = make.size(1, 90), make.size(1, 90)
    else:
        hidden, inner = (scheme.block * make.size(1, 1 if scheme.block > 32 else 3) for _ in range(2))
    return _mixture(make, hidden, inner)


def expert_mlp_int8(make: Maker) -> Case:
    """A sum that rounds differently may round to another code: the tolerance is that of coarse arithmetic."""
    block = max(make.scheme().block, 32)
    made = _mixture(make, block * make.size(1, 2), block * make.size(1, 2), most=8)
    return replace(made, dtype=torch.bfloat16, facts={**made.facts, "dtype": make.dtype})


def expert_mlp_bf16(make: Maker) -> Case:
    made = expert_mlp(make)
    return replace(made, dtype=torch.bfloat16, facts={**made.facts, "dtype": make.dtype})


def _mixture(make: Maker, hidden: int, inner: int, most: int = 24) -> Case:
    experts = make.size(1, 9)
    tokens, per_token = make.pick.choice((1, make.size(1, most))), make.size(1, experts)
    chosen = torch.rand(tokens, experts, generator=make.numbers).argsort(-1)[:, :per_token].to(torch.int32)
    weights = make.state(tokens, per_token).abs()
    gate, up, down = (
        make.weight(make.scheme(), experts * outer, columns).reshape_leading(experts, outer)
        for outer, columns in ((inner, hidden), (inner, hidden), (hidden, inner))
    )
    biased = make.size(0, 2) == 0
    biases = [make.normal(experts, outer) if biased else None for outer in (inner, inner, hidden)]
    x = make.normal(tokens, hidden) / hidden**0.5
    args = (x, chosen, weights, gate, up, down, *biases, make.pick.choice(KINDS))
    return Case(args, make.dtype, {"weight": gate, "weights": (gate, up, down)})


GENERATORS: dict[str, Callable[[Maker], Case]] = {
    function.__name__: function for function in (route, add_gated, expert_mlp, expert_mlp_int8, expert_mlp_bf16)
}
