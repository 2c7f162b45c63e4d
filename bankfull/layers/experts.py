"""A mixture of experts as a feed-forward layer: a router, stacked experts, and optionally a shared expert."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bankfull.layers.build import Build
from bankfull.layers.linear import Linear
from bankfull.layers.mlp import activation
from bankfull.ops import (
    Operation,
    RoutingRule,
    add,
    add_gated,
    all_reduce,
    combine,
    dispatch,
    expert_mlp,
    expert_mlp_bf16,
    expert_mlp_int8,
    gather_rows,
    route,
)
from bankfull.ops.experts.body import CLAMPED_SWIGLU
from bankfull.ops.products.activations import BF16, FLOAT, INT8, ActivationFormat
from bankfull.ranks.expert_ranks import ExpertSpread, hottest
from bankfull.weights.blank_source import META
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
        names = names or ExpertNames()
        rule, hidden = shape.rule, shape.hidden
        self.shape, self.rule = shape, rule
        self.kind = shape.kind if shape.kind == CLAMPED_SWIGLU else activation(shape.kind)
        self.shared, self.shared_gate = shared, shared_gate
        self.router = Linear(build.at(names.router), hidden, rule.experts, shape.router_bias)
        self.choice_bias: Tensor | None = None
        if names.choice_bias is not None:  # a rounded bias would choose other experts
            precise = torch.promote_types(build.dtype, torch.float32)
            self.choice_bias = build.tensor(names.choice_bias, (rule.experts,), precise)
        self.ranks, self.spread = build.experts, _spread(build, rule.experts)
        self._counts: Tensor | None = None
        self._device = build.device
        self._origin = None if self.ranks is None else (build, names)
        self._read(build, names)
        if self.ranks is not None and build.device != META:
            self.ranks.layers.append(self)
        self.sum_of_ranks = build.sum_of_ranks(f"{names.down.replace('{}.', '')}.weight")
        """Set where this rank holds a part of each expert's width."""
        self._route = build.bind(route, experts=rule.experts)
        self._add = build.bind(add)
        self._add_gated = build.bind(add_gated)
        if self.ranks is not None:
            self._dispatch, self._combine, self._gather, self._sum = (
                build.bind(each) for each in (dispatch, combine, gather_rows, all_reduce)
            )

    def _read(self, build: Build, names: ExpertNames) -> None:
        """Read the experts that this rank holds."""
        count, hidden, inner = self.rule.experts, self.shape.hidden, build.expert_width(self.shape.inner)
        held = None if self.spread is None else self.spread.held

        def matrices(name: str, shape: tuple[int, int], fused: int = 1) -> QTensor:
            whole = f"{name}.weight"
            return build.stacked(whole, count, shape) if held is None else build.held(whole, count, shape, held, fused)

        def bias(name: str, size: int) -> Tensor | None:
            whole = f"{name.replace('{}.', '')}.bias"
            if not self.shape.bias:
                return None
            return build.tensor(whole, (count, size)) if held is None else build.held_bias(whole, count, size, held)

        down = matrices(names.down, (hidden, inner))
        if names.gate_up is None:
            gate, up = (matrices(name, (inner, hidden)) for name in (names.gate, names.up))
        else:
            both = matrices(names.gate_up, (2 * inner, hidden), fused=2)
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
        if self.ranks is not None and self.ranks.width is not None and self.down_bias is not None:
            # One rank adds it, because the results are summed.
            self.down_bias = self.down_bias * (self.ranks.width.index == 0)

    @property
    def expert_count(self) -> int:
        return self.rule.experts

    def count_routing(self) -> None:
        """Count the tokens of each expert from now on."""
        self._counts = torch.zeros(self.rule.experts, dtype=torch.int64, device=self._device)

    def counted_routing(self) -> Tensor:
        """The tokens of each expert (experts,) since `count_routing`, of all ranks; stops counting."""
        counts, self._counts = self._counts, None
        assert counts is not None
        return counts if self.ranks is None else self._sum(counts, self.ranks.group)

    def replicate(self, counts: Tensor | Sequence[float], hot: int) -> None:
        """Hold the `hot` experts with the highest counts on every rank, so that their tokens stay where they are. Every
        rank of the group calls it with the same counts, between two steps."""
        assert self.spread is not None and self._origin is not None and len(counts) == self.rule.experts
        self.spread = replace(self.spread, hot=hottest(counts, hot))
        self._read(*self._origin)

    def __call__(self, x: Tensor) -> Tensor:
        if self.ranks is None:
            return self._beside(x, self._mixture(x))
        mine = self.ranks.share(x)
        y = self._beside(mine, self._spread_mixture(mine))
        if self.ranks.tokens is None:
            return y
        gathered: Tensor = self._gather(self.ranks.padded(y, len(x)), self.ranks.tokens, len(x))
        return gathered

    def _routed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = self._route(self.router(x), self.choice_bias, self.rule)
        if self._counts is not None:
            self._counts += torch.bincount(chosen.flatten(), minlength=self.rule.experts)
        return weights, chosen

    def _mixture(self, x: Tensor) -> Tensor:
        weights, chosen = self._routed(x)
        y = self._run(x, chosen, weights)
        return y if self.sum_of_ranks is None else self.sum_of_ranks(y)

    def _spread_mixture(self, x: Tensor) -> Tensor:
        """The mixture of this rank's tokens, whose experts other ranks hold, too. All ranks get here in every step,
        also without tokens."""
        assert self.ranks is not None
        weights, chosen = self._routed(x)
        group, spread = self.ranks.group, self.spread
        rows, places, scales, row, sent, counts = self._dispatch(x, chosen, weights, spread, group)
        y = self._run(rows, places, scales) if len(rows) else rows
        mixed: Tensor = self._combine(y, row, sent, counts, len(x), self.rule.per_token, spread, group)
        return mixed if self.ranks.width is None else self._sum(mixed, self.ranks.width)

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


def _spread(build: Build, experts: int) -> ExpertSpread | None:
    if build.experts is None:
        return None
    width = build.experts.width
    if width is not None:
        assert build.shard is not None and width.index == build.shard.group.index * width.size // build.tensor_ranks
    return build.experts.spread(build.prefix, experts, build.device)


def _readable(build: Build, gate: QTensor, up: QTensor, down: QTensor) -> tuple[QTensor, QTensor, QTensor]:
    """The matrices in formats that the device's kernels read. What no GPU kernel reads (gate and up in different
    formats, MXFP4 with extreme scales) is dequantized at load: the torch body would wait for the device in every
    layer."""
    facts = {"dtype": build.dtype, "weight": gate, "weights": (gate, up, down)}
    if build.kit.device != "cuda" or not build.kit.prefer or build.kit.offers(expert_mlp, **facts):
        return gate, up, down
    formats = ", ".join(dict.fromkeys(one.scheme.name.upper() for one in (gate, up, down)))
    reason = f"no kernel reads experts in {formats}"
    dense = [one if one.is_dense else build.expanded(one, reason) for one in (gate, up, down)]
    return dense[0], dense[1], dense[2]
