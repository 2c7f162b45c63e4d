"""Lightning attention: linear attention with a fixed decay per head, an output norm and an output gate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bankfull.axes import HEADS, joined
from bankfull.layers.batch import Batch
from bankfull.layers.build import Build
from bankfull.layers.linear import Linear, split_linear
from bankfull.layers.mixer import Angles, recurrent_plan
from bankfull.layers.norm import RMSNorm
from bankfull.ops import RecurrentMeta, activate, activate_mul, linear_attention
from bankfull.state.spec import Recurrent, StateSpec, TensorSpec
from bankfull.state.storage import LayerStates


@dataclass(frozen=True, slots=True)
class LightningShape:
    hidden: int
    heads: int
    size: int
    """Elements of a head's query, key and value."""
    activation: str = "silu"
    """Function of queries, keys and values."""
    eps: float = 1e-6
    """Epsilon of the output norm."""


def lightning_slopes(heads: int, layer: int, layers: int) -> Tensor:
    """The slope of each head: the decay per token is exp(-slope). Later heads and later layers remember longer."""
    rates = (1 / 2 ** (8 / heads)) ** (torch.arange(heads) + 1)
    return rates * (1 - layer / (layers - 1 + 1e-5) + 1e-5)


class LightningMixer:
    rope: str | None = None

    def __init__(self, build: Build, shape: LightningShape, slopes: Tensor) -> None:
        """`slopes`: one for each head of the model, also those of other ranks; the decay per token is exp(-slope)."""
        self.shape = shape
        width, hidden = HEADS(shape.heads, shape.size), shape.hidden
        # The file has the rows of query, key and value side by side for each head.
        places = torch.arange(3 * width).view(shape.heads, 3, shape.size).transpose(0, 1).flatten()
        by_head, at = HEADS(shape.heads, 3 * shape.size), build.at("qkv_proj")
        (self.qkv,) = split_linear(at, hidden, [joined(width, width, width)], order=places, stored=by_head)
        self.gate = Linear(build.at("output_gate"), hidden, width)
        self.out = Linear(build.at("out_proj"), width, hidden)
        self.norm = RMSNorm(build.at("norm"), width, shape.eps)
        precise = torch.float64 if build.dtype == torch.float64 else torch.float32
        first = 0 if build.shard is None else build.shard.group.index * shape.heads
        self.slopes = slopes[first : first + shape.heads].to(precise).to(build.device)
        state = TensorSpec("state", (shape.heads, shape.size, shape.size), str(precise).removeprefix("torch."))
        self.states: tuple[StateSpec, ...] = (Recurrent((state,)),)
        self._activate = build.bind(activate)
        self._mix = build.bind(linear_attention)
        self._gate = build.bind(activate_mul)

    def plan(self, batch: Batch, groups: Sequence[int | None]) -> RecurrentMeta:
        return recurrent_plan(batch)

    def run(self, x: Tensor, states: LayerStates, meta: RecurrentMeta, angles: Angles | None) -> Tensor:
        shape, (state,) = self.shape, states
        heads = self._activate(self.qkv(x), shape.activation).unflatten(-1, (-1, shape.size))
        q, k, v = heads.split(shape.heads, 1)
        y = self._mix(q, k, v, self.slopes, state["state"], None, meta)
        return self.out(self._gate(self.gate(x), self.norm(y.flatten(1)), "sigmoid"))
