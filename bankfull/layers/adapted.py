"""Layers with a low-rank branch beside them: the branch is another model's, the layer's weights are shared."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

from torch import Tensor
from torch.nn.functional import silu

from bankfull.layers.attention import Attention
from bankfull.layers.build import Build
from bankfull.layers.linear import Linear
from bankfull.ops.reference.linear import GROUP
from bankfull.ops.registry import INT8, INT8_FEW
from bankfull.state.spec import StateSpec
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
    made = copy(attention)
    made.states, made.adapter, made.out = (state,), qkv, Adapted(attention.out, out)
    return made


def own_matrix(build: Build, weight: Tensor) -> QTensor:
    """A matrix of a drafter, as precise as the model's: 8 bits where the model's activations are rounded."""
    if build.kit.activations in (INT8, INT8_FEW) and weight.shape[1] % GROUP == 0:
        return quantize(weight, "q8_0").to(build.device)
    return QTensor.dense(weight.to(build.device, build.matrices))


def own_product(build: Build, weight: Tensor) -> Linear:
    """A product with a matrix of a drafter."""
    outer, inner = weight.shape
    return Linear(build, inner, outer, weight=own_matrix(build, weight))
