"""Layers with a low-rank branch beside them: the branch is another model's, the layer's weights are shared."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

from torch import Tensor
from torch.nn.functional import silu

from bankfull.layers.attention import Attention
from bankfull.layers.build import Build
from bankfull.layers.linear import Linear
from bankfull.ops.cost import Operands
from bankfull.ops.products.activations import BF16, INT8, ActivationRule
from bankfull.state.spec import StateSpec
from bankfull.weights.formats import SCHEMES
from bankfull.weights.qtensor import QTensor
from bankfull.weights.quantize import quantize

Product = Callable[[Tensor], Tensor]


class Adapter:
    """up(down(x)), or up(silu(down(x)))."""

    def __init__(self, down: Product, up: Product, bent: bool = False) -> None:
        self._down, self._up, self._bent = down, up, bent

    def __call__(self, x: Tensor) -> Tensor:
        inner = self._down(x)
        return self._up(silu(inner) if self._bent else inner)


class Adapted:
    """A layer plus an adapter of the same input. It takes normed rows only."""

    def __init__(self, layer: Callable[..., Tensor], adapter: Adapter) -> None:
        self._layer, self._adapter = layer, adapter

    def __call__(self, x: Tensor) -> Tensor:
        return self._layer(x) + self._adapter(x)

    def norms(self, rows: int) -> bool:
        return False


def adapted_attention(attention: Attention, qkv: Adapter, out: Adapter, state: StateSpec) -> Attention:
    """The attention layer with adapters of queries, keys and values and of its output, over another layer's state."""
    adapted = copy(attention)
    adapted.states, adapted.adapter, adapted.out = (state,), qkv, Adapted(attention.out, out)
    return adapted


OWN = SCHEMES["q8_0"]


def narrows_own(rule: ActivationRule, columns: int = 0) -> bool:
    """Whether a drafter's matrices are 8-bit blocks: where these meet activations in 8 bits. Then they are as precise
    as the model's."""
    return rule.of(OWN, columns) is INT8


def own_operands(rule: ActivationRule) -> Operands:
    """Operands of a drafter's products."""
    return "int8" if narrows_own(rule) else "bf16" if rule.dense is BF16 else "own"


def own_matrix(build: Build, weight: Tensor) -> QTensor:
    """A matrix of a drafter."""
    if narrows_own(build.activations, weight.shape[1]):
        return quantize(weight, OWN.name).to(build.device)
    return QTensor.dense(weight.to(build.device, build.matrices))


def own_product(build: Build, weight: Tensor) -> Linear:
    """A product with a matrix of a drafter."""
    outer, inner = weight.shape
    return Linear(build, inner, outer, weight=own_matrix(build, weight))
