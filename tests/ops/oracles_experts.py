"""Independent definitions of routing and mixtures of experts: numpy, float64, one token and expert at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bankfull.ops import RoutingRule
from bankfull.ops.experts.body import CLAMPED_SWIGLU, SIGMOID
from bankfull.weights.qtensor import QTensor
from tests.ops import oracles
from tests.ops.oracles import Array, f64


def route(logits: Tensor, bias: Tensor | None, rule: RoutingRule) -> tuple[Array, Array]:
    weights, chosen = np.zeros((len(logits), rule.per_token)), np.zeros((len(logits), rule.per_token))
    size = rule.experts // rule.groups
    # Scores are compared in the operation's precision: equal ones must be equal.
    wide = logits if logits.dtype == torch.float64 else logits.float()
    for row, found in enumerate(wide):
        scores = (found.sigmoid() if rule.scores == SIGMOID else found.softmax(-1)).tolist()
        ranked = (torch.tensor(scores, dtype=wide.dtype) + (0 if bias is None else bias)).tolist()
        groups = [sorted(ranked[g * size : (g + 1) * size], reverse=True) for g in range(rule.groups)]
        ranks = torch.tensor([group[: rule.group_best] for group in groups], dtype=wide.dtype).sum(-1).tolist()
        kept = sorted(range(rule.groups), key=lambda g: (-ranks[g], g))[: rule.groups_kept]
        able = [expert for expert in range(rule.experts) if expert // size in kept]
        best = sorted(able, key=lambda expert: (-ranked[expert], expert))[: rule.per_token]
        own = np.array([scores[expert] for expert in best])
        weights[row] = (own / own.sum() if rule.renormalize else own) * rule.scale
        chosen[row] = best
    return weights, chosen


def add_gated(x: Tensor, delta: Tensor, gate: Tensor) -> Array:
    return f64(x) + f64(delta) / (1 + np.exp(-f64(gate)))


Product = Callable[[Tensor, QTensor, Tensor | None], Array]


def _mixture(product: Product, args: tuple[Any, ...]) -> Array:
    x, chosen, weights, gate, up, down, *biases, kind = args
    out = np.zeros(tuple(x.shape))
    for token in range(len(x)):
        for slot, expert in enumerate(chosen[token].tolist()):
            gate_bias, up_bias, down_bias = (None if bias is None else bias[expert] for bias in biases)

            def one(weight: QTensor, expert: int = expert) -> QTensor:
                return weight.rows(slice(expert, expert + 1)).reshape_leading(weight.shape[1])

            row = x[token : token + 1]
            opened = torch.from_numpy(product(row, one(gate), gate_bias))
            other = torch.from_numpy(product(row, one(up), up_bias))
            hidden = torch.from_numpy(_gated(opened, other, kind)).to(x.dtype)
            out[token] += f64(weights)[token, slot] * product(hidden, one(down), down_bias)[0]
    return out


def _gated(gate: Tensor, up: Tensor, kind: str) -> Array:
    if kind != CLAMPED_SWIGLU:
        return oracles.activate_mul(gate, up, kind)
    low, both = np.minimum(f64(gate), 7.0), np.clip(f64(up), -7.0, 7.0)
    return (both + 1) * low / (1 + np.exp(-1.702 * low))


def expert_mlp(*args: Any) -> Array:
    return _mixture(oracles.linear, args)


def expert_mlp_int8(*args: Any) -> Array:
    return _mixture(oracles.linear_int8, args)


def expert_mlp_bf16(*args: Any) -> Array:
    return _mixture(oracles.linear_bf16, args)


ORACLES: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (route, add_gated, expert_mlp, expert_mlp_int8, expert_mlp_bf16)
}
