"""Mixtures of experts: a router chooses a few experts for each token, and each computes a gated feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from bankfull.errors import ModelError
from bankfull.ops.cost import Cost, nbytes, rounded_to
from bankfull.ops.norm.body import wide
from bankfull.ops.pointwise.body import activate_mul
from bankfull.ops.products.body import quantized_groups
from bankfull.ops.registry import op
from bankfull.weights.qtensor import QTensor

SOFTMAX, SIGMOID = "softmax", "sigmoid"
TINY = 1e-20
"""Added to the sum of the chosen scores, which may underflow."""
CLAMPED_SWIGLU = "clamped_swiglu"
SWIGLU_LIMIT, SWIGLU_SLOPE = 7.0, 1.702
"""gpt-oss clamps the gate from above and `up` on both sides; the gate's sigmoid has this slope."""


class PlainRule(NamedTuple):
    """A RoutingRule in numbers, as kernels take it."""

    experts: int
    per_token: int
    sigmoid: bool
    renormalize: bool
    scale: float
    groups: int
    groups_kept: int
    group_best: int


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """How a router's logits choose a token's experts and weigh them."""

    experts: int
    per_token: int
    """Experts of each token."""
    scores: str = SOFTMAX
    """SOFTMAX over all experts, or SIGMOID of each logit."""
    renormalize: bool = False
    """Whether the chosen scores are divided by their sum. With SOFTMAX this is the softmax over the chosen logits."""
    scale: float = 1.0
    """Factor of all weights."""
    groups: int = 1
    """Groups of consecutive experts. Only experts of the best `groups_kept` groups can be chosen."""
    groups_kept: int = 1
    group_best: int = 1
    """Best scores of a group whose sum ranks it: 1 in DeepSeek-V2, 2 in DeepSeek-V3."""

    def __post_init__(self) -> None:
        if self.experts < 1 or self.per_token < 1:
            raise ModelError(
                f"A mixture of experts needs at least one expert and one expert per token, but the model's "
                f"configuration has {self.experts} and {self.per_token}."
            )
        if self.per_token > self.experts:
            raise ModelError(
                f"The model's configuration has {self.per_token} experts per token, but only {self.experts} experts."
            )
        if self.scores not in (SOFTMAX, SIGMOID):
            raise ModelError(f"Routing scores {self.scores[:40]!r} are not supported; supported are softmax, sigmoid.")
        if self.groups < 1 or self.experts % self.groups or not 1 <= self.groups_kept <= self.groups:
            raise ModelError(
                f"The model's configuration divides {self.experts} experts into {self.groups} groups and keeps "
                f"{self.groups_kept} of them, which is impossible."
            )
        size = self.experts // self.groups
        if self.per_token > self.groups_kept * size or not 1 <= self.group_best <= size:
            raise ModelError(
                f"The model's configuration chooses {self.per_token} experts from {self.groups_kept} groups of {size} "
                f"experts, ranked by their best {self.group_best}, which is impossible."
            )

    @property
    def share(self) -> float:
        """Fraction of the experts that a token uses."""
        return self.per_token / self.experts

    @property
    def plain(self) -> PlainRule:
        return PlainRule(
            self.experts,
            self.per_token,
            self.scores == SIGMOID,
            self.renormalize,
            self.scale,
            self.groups,
            self.groups_kept,
            self.group_best,
        )


def distinct_experts(tokens: int, experts: int, per_token: int) -> float:
    """Expected number of different experts that tokens use if each set of experts is equally likely."""
    if tokens == 0:
        return 0.0
    unused = experts - per_token  # by the first token; this form is exact for one token
    return experts - unused * (unused / experts) ** (tokens - 1)


def _first_best(scores: Tensor, count: int) -> Tensor:
    """Indices of the highest scores of each row, in descending order; the lowest index first among equal ones."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _route_cost(logits: Tensor, bias: Tensor | None, rule: RoutingRule) -> Cost:
    pairs = len(logits) * rule.per_token
    # An exponential of eight operations per expert, and the comparisons of the selection.
    flops = float(len(logits) * rule.experts * (8 + rule.per_token))
    return Cost(flops, nbytes(logits, bias), pairs * (wide(logits).element_size() + 4))


def _route_shape(logits: Tensor, bias: Tensor | None, rule: RoutingRule) -> tuple[Tensor, Tensor]:
    weights = wide(logits).new_empty(len(logits), rule.per_token)
    return weights, torch.empty_like(weights, dtype=torch.int32)


@op(cost=_route_cost, shape=_route_shape)
def route(logits: Tensor, bias: Tensor | None, rule: RoutingRule) -> tuple[Tensor, Tensor]:
    """Weights (tokens, per_token), at least float32, and ids (int32) of each token's experts, best first.

    `bias` is added for the choice only: weights come from the scores without it. Among equal scores the lowest id
    wins. Every token gets `per_token` different experts, also where logits are not finite."""
    exact = wide(logits)
    scores = exact.softmax(-1) if rule.scores == SOFTMAX else exact.sigmoid()
    ranked = scores if bias is None else scores + bias
    if rule.groups > 1:
        groups = ranked.unflatten(-1, (rule.groups, -1))
        best = groups.topk(rule.group_best, -1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter(1, _first_best(best, rule.groups_kept), True)
        ranked = groups.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)
    chosen = _first_best(ranked, rule.per_token)
    weights = scores.gather(1, chosen)
    if rule.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    return weights * rule.scale, chosen.to(torch.int32)


def gated(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """f(gate) * up; for CLAMPED_SWIGLU gpt-oss's form of it."""
    if kind != CLAMPED_SWIGLU:
        return activate_mul.body(gate, up, kind)
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (up + 1) * gate * torch.sigmoid(gate * SWIGLU_SLOPE)


def _experts_cost(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate: QTensor,
    up: QTensor,
    down: QTensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    kind: str,
) -> Cost:
    """The choice of experts is data, so the cost is an expectation: see `distinct_experts`. Arithmetic is that of the
    products."""
    (tokens, per_token), (experts, inner, hidden) = chosen.shape, gate.shape
    touched = distinct_experts(tokens, experts, per_token)
    each = nbytes(gate, up, down, gate_bias, up_bias, down_bias) / experts
    flops = 6.0 * tokens * per_token * hidden * inner
    return Cost(flops, nbytes(x, chosen, weights) + touched * each, nbytes(x))


def _experts_shape(x: Tensor, *others: object) -> Tensor:
    return x.new_empty(x.shape)


def _mixture(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    matrices: tuple[QTensor, QTensor, QTensor],
    biases: tuple[Tensor | None, Tensor | None, Tensor | None],
    kind: str,
    rounded: Callable[[Tensor], Tensor],
) -> Tensor:
    """`rounded` rounds the activations before each product. Experts are added in the order of their ids, so that a
    token's sum does not depend on the other tokens."""
    total = torch.zeros_like(x, dtype=wide(x).dtype)
    rows, inner = rounded(x), matrices[0].shape[1]
    for expert in chosen.unique().tolist():
        token, slot = torch.where(chosen == expert)
        gate, up, down = (one.rows(slice(expert, expert + 1)).dequantize(x.dtype)[0] for one in matrices)
        gate_bias, up_bias, down_bias = (None if one is None else one[expert] for one in biases)
        assert gate.shape[0] == inner
        mine = rows[token]
        hidden = gated(linear(mine, gate, gate_bias), linear(mine, up, up_bias), kind)
        out = linear(rounded(hidden), down, down_bias)
        total.index_add_(0, token, wide(out) * weights[token, slot, None].to(total.dtype))
    return total.to(x.dtype)


@op(cost=_experts_cost, shape=_experts_shape)
def expert_mlp(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate: QTensor,
    up: QTensor,
    down: QTensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    kind: str,
) -> Tensor:
    """The weighted sum of each token's experts: down(f(gate(x)) * up(x)), weight-only quantization.

    `chosen` and `weights` come from `route`. Matrices are stacked: `gate` and `up` (experts, inner, hidden), `down`
    (experts, hidden, inner); biases (experts, outputs)."""
    return _mixture(x, chosen, weights, (gate, up, down), (gate_bias, up_bias, down_bias), kind, lambda rows: rows)


@op(cost=rounded_to("int8", _experts_cost), shape=_experts_shape)
def expert_mlp_int8(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate: QTensor,
    up: QTensor,
    down: QTensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    kind: str,
) -> Tensor:
    """Lossy: `expert_mlp` with activations quantized to int8 in groups of 32 columns before each product. A kernel may
    keep them in bfloat16 where that is no slower for many rows."""
    return _mixture(x, chosen, weights, (gate, up, down), (gate_bias, up_bias, down_bias), kind, quantized_groups)


@op(cost=rounded_to("bf16", _experts_cost), shape=_experts_shape)
def expert_mlp_bf16(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate: QTensor,
    up: QTensor,
    down: QTensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    kind: str,
) -> Tensor:
    """`expert_mlp` with activations rounded to bfloat16 before each product. A kernel may also round block-quantized
    weights to bfloat16."""

    def rounded(rows: Tensor) -> Tensor:
        return rows.to(torch.bfloat16).to(rows.dtype)

    return _mixture(x, chosen, weights, (gate, up, down), (gate_bias, up_bias, down_bias), kind, rounded)


def _gated_sum_cost(x: Tensor, delta: Tensor, gate: Tensor) -> Cost:
    return Cost(2.0 * x.numel() + 8.0 * gate.numel(), nbytes(x, delta, gate), nbytes(x))


@op(cost=_gated_sum_cost, shape=_experts_shape)
def add_gated(x: Tensor, delta: Tensor, gate: Tensor) -> Tensor:
    """x + sigmoid(gate) * delta with one gate (tokens, 1) per token: a shared expert beside the chosen ones."""
    return (wide(x) + wide(gate).sigmoid() * wide(delta)).to(x.dtype)
