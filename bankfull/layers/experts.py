"""A mixture of experts as a feed-forward layer: a router, stacked experts, and optionally a shared expert."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bankfull.axes import EXPERTS, HIDDEN, NEURONS, Axes, joined
from bankfull.layers.build import Build
from bankfull.layers.linear import Linear
from bankfull.layers.mlp import activation
from bankfull.layers.placement import Role
from bankfull.ops import (
    Operation,
    RoutingRule,
    add,
    add_gated,
    expert_mlp,
    expert_mlp_bf16,
    expert_mlp_int8,
    route,
)
from bankfull.ops.experts.body import CLAMPED_SWIGLU
from bankfull.ops.products.activations import BF16, FLOAT, INT8, ActivationFormat
from bankfull.weights.qtensor import QTensor

__all__ = ["CLAMPED_SWIGLU", "ExpertNames", "Experts", "ExpertsShape", "RoutingRule"]

PRODUCTS: dict[ActivationFormat, Operation] = {FLOAT: expert_mlp, BF16: expert_mlp_bf16, INT8: expert_mlp_int8}


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Tensor names below the layer. "{}" is the expert's number; `Build.stacked` also finds whole tensors."""

    router: str = "gate"
    gate: str = "experts.{}.gate_proj"
    up: str = "experts.{}.up_proj"
    down: str = "experts.{}.down_proj"
    gate_up: str | None = None
    """One tensor (experts, 2 inner, hidden) that holds gate, then up; None = two tensors."""
    choice_bias: str | None = None
    """Vector that is added to the scores for the choice of experts; None = the family has none."""


MIXTRAL_NAMES = ExpertNames(gate="experts.{}.w1", up="experts.{}.w3", down="experts.{}.w2")
"""Names below `block_sparse_moe` in Mixtral's files and those of its descendants."""


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    hidden: int
    inner: int
    """Width of one expert."""
    rule: RoutingRule
    kind: str = "silu"
    """Activation by its name in checkpoints, or CLAMPED_SWIGLU."""
    router_bias: bool = False
    bias: bool = False
    """Whether gate, up and down of each expert have biases."""


class Experts:
    """A feed-forward layer (`Feed`): the weighted sum of each token's experts, plus the shared expert if there is one.

    `shared`: a feed-forward layer that every token passes. `shared_gate`: a layer with one output, whose sigmoid
    scales the shared expert's result."""

    def __init__(
        self,
        build: Build,
        shape: ExpertsShape,
        names: ExpertNames | None = None,
        *,
        shared: Callable[[Tensor], Tensor] | None = None,
        shared_gate: Linear | None = None,
    ) -> None:
        build, names = build.of(Role.FEED), names or ExpertNames()
        rule, experts = shape.rule, EXPERTS(shape.rule.experts)
        self.shape, self.rule = shape, rule
        self.kind = shape.kind if shape.kind == CLAMPED_SWIGLU else activation(shape.kind)
        self.shared, self.shared_gate = shared, shared_gate
        self.router = Linear(build.at(names.router), shape.hidden, experts, shape.router_bias)
        self.choice_bias: Tensor | None = None
        if names.choice_bias is not None:  # a rounded bias would choose other experts
            precise = torch.promote_types(build.dtype, torch.float32)
            self.choice_bias = build.tensor(names.choice_bias, (experts,), precise)
        self._read(build, names)
        self.sum_of_ranks = build.sum_of_ranks(f"{names.down.replace('{}.', '')}.weight")
        """Set where only a part of each expert's width is here."""
        self._route = build.bind(route, experts=rule.experts)
        self._add = build.bind(add)
        self._add_gated = build.bind(add_gated)

    @property
    def held(self) -> Sequence[int] | None:
        """The experts that are here; None: all."""
        return None

    @property
    def inner(self) -> int:
        """The width of an expert here."""
        return self.shape.inner

    def _read(self, build: Build, names: ExpertNames) -> None:
        """Read the experts that are here."""
        count, hidden, inner = EXPERTS(self.rule.experts), HIDDEN(self.shape.hidden), NEURONS(self.inner)

        def matrices(name: str, axes: Axes) -> QTensor:
            return build.stacked(f"{name}.weight", count, axes, self.held)

        def bias(name: str, size: int) -> Tensor | None:
            whole = f"{name.replace('{}.', '')}.bias"
            return build.bias_of_experts(whole, count, size, self.held) if self.shape.bias else None

        down = matrices(names.down, (hidden, inner))
        if names.gate_up is None:
            gate, up = (matrices(name, (inner, hidden)) for name in (names.gate, names.up))
        else:
            both = matrices(names.gate_up, (joined(inner, inner), hidden))
            gate, up = (both.of_each(part) for part in (slice(0, inner), slice(inner, 2 * inner)))
        gate, up, down = _readable(build, gate, up, down)
        self.expert_bytes = -(-sum(one.nbytes for one in (gate, up, down)) // max(1, gate.shape[0]))
        self.wants = build.activations.of_experts((gate, up, down))
        """The format of the activations in all of their products."""
        self._operation = PRODUCTS[self.wants]
        facts = {"weight": gate, "weights": (gate, up, down)}
        self._experts = build.bind(self._operation, **facts)
        self.gate, self.up, self.down = (
            build.kit.prepare(self._operation, one, dtype=build.dtype, **facts) for one in (gate, up, down)
        )
        self.gate_bias, self.up_bias, self.down_bias = (
            bias(name, size) for name, size in ((names.gate, inner), (names.up, inner), (names.down, hidden))
        )

    def __call__(self, x: Tensor) -> Tensor:
        return self._beside(x, self._mixture(x))

    def _routed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = self._route(self.router(x), self.choice_bias, self.rule)
        return weights, chosen

    def _mixture(self, x: Tensor) -> Tensor:
        weights, chosen = self._routed(x)
        y = self._run(x, chosen, weights)
        return y if self.sum_of_ranks is None else self.sum_of_ranks(y)

    def _run(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        y: Tensor = self._experts(
            x,
            chosen,
            weights,
            self.gate,
            self.up,
            self.down,
            self.gate_bias,
            self.up_bias,
            self.down_bias,
            self.kind,
        )
        return y

    def _beside(self, x: Tensor, y: Tensor) -> Tensor:
        """`y` with the result of the shared expert added."""
        if self.shared is None:
            return y
        beside = self.shared(x)
        both = self._add(y, beside) if self.shared_gate is None else self._add_gated(y, beside, self.shared_gate(x))
        assert isinstance(both, Tensor)
        return both


def _readable(build: Build, gate: QTensor, up: QTensor, down: QTensor) -> tuple[QTensor, QTensor, QTensor]:
    """The matrices in formats that the device's kernels read. What no GPU kernel reads (gate and up in different
    formats, MXFP4 with extreme scales) is dequantized at load: the torch body would wait for the device in every
    layer."""
    facts = {"dtype": build.dtype, "weight": gate, "weights": (gate, up, down)}
    if build.kit.device != "cuda" or not build.kit.has_kernels or build.kit.offers(expert_mlp, **facts):
        return gate, up, down
    formats = ", ".join(dict.fromkeys(one.scheme.name.upper() for one in (gate, up, down)))
    reason = f"no kernel reads experts in {formats}"
    dense = [one if one.is_dense else build.expanded(one, reason) for one in (gate, up, down)]
    return dense[0], dense[1], dense[2]
