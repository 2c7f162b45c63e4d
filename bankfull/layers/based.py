"""The two recurrent mixers of BASED: linear attention over Taylor features, and a gated short convolution.

Its third mixer, attention in small windows, is `Attention` with a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bankfull.axes import CHANNELS, HEADS, PARTS, TAPS
from bankfull.layers.batch import Batch
from bankfull.layers.build import Build
from bankfull.layers.linear import Linear, stack
from bankfull.layers.mixer import Angles, recurrent_plan
from bankfull.ops import RecurrentMeta, activate_mul, causal_conv, linear_attention, taylor_features, taylor_size
from bankfull.state.spec import Recurrent, StateSpec, TensorSpec
from bankfull.state.storage import LayerStates


@dataclass(frozen=True, slots=True)
class BasedShape:
    hidden: int
    heads: int
    size: int
    """Elements of a head's value."""
    features: int = 16
    """Elements of a head's query and key before the feature map, which gives 1 + n + n^2."""


class BasedMixer:
    rope: str | None = None

    def __init__(self, build: Build, shape: BasedShape) -> None:
        self.shape = shape
        small, width = HEADS(shape.heads, shape.features), HEADS(shape.heads, shape.size)
        hidden = shape.hidden
        self.q = Linear(build.at("proj_q"), hidden, small)
        self.k = Linear(build.at("proj_k"), hidden, small)
        self.v = Linear(build.at("proj_v"), hidden, width)
        self.out = Linear(build.at("out_proj"), width, hidden)
        self.qkv = stack(build, (self.q, self.k, self.v))
        precise = torch.float64 if build.dtype == torch.float64 else torch.float32
        self.slopes = torch.zeros(shape.heads, dtype=precise, device=build.device)
        dtype, expanded = str(precise).removeprefix("torch."), taylor_size(shape.features)
        state = TensorSpec("state", (shape.heads, expanded, shape.size), dtype)
        normalizer = TensorSpec("normalizer", (shape.heads, expanded), dtype)
        self.states: tuple[StateSpec, ...] = (Recurrent((state, normalizer)),)
        self._expand = build.bind(taylor_features)
        self._mix = build.bind(linear_attention)

    def plan(self, batch: Batch, groups: Sequence[int | None]) -> RecurrentMeta:
        return recurrent_plan(batch)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape = self.shape
        small = shape.heads * shape.features
        if self.qkv is None:
            q, k, v = self.q(x), self.k(x), self.v(x)
        else:
            q, k, v = self.qkv(x).split((small, small, shape.heads * shape.size), -1)
        few, many = (-1, shape.features), (-1, shape.size)
        return q.unflatten(-1, few), k.unflatten(-1, few), v.unflatten(-1, many)

    def run(self, x: Tensor, states: LayerStates, meta: RecurrentMeta, angles: Angles | None) -> Tensor:
        (state,) = states
        q, k, v = self._project(x)
        y = self._mix(self._expand(q), self._expand(k), v, self.slopes, state["state"], state["normalizer"], meta)
        return self.out(y.flatten(1))


@dataclass(frozen=True, slots=True)
class ShortConvShape:
    hidden: int
    inner: int
    """Channels of the convolution."""
    width: int = 3
    """Tokens in the convolution's window."""


class ShortConvMixer:
    """out(silu(gate(x)) * conv(in(x))): a causal convolution over a few tokens, which linear attention alone cannot
    compare exactly."""

    rope: str | None = None

    def __init__(self, build: Build, shape: ShortConvShape) -> None:
        self.shape = shape
        hidden, inner = shape.hidden, CHANNELS(shape.inner)
        self.into = Linear(build.at("in_proj"), hidden, inner)
        self.gate = Linear(build.at("gate_proj"), hidden, inner)
        self.out = Linear(build.at("out_proj"), inner, hidden)
        self.kernel = build.tensor("conv1d.weight", (inner, PARTS(1), TAPS(shape.width)))[:, 0]
        self.kernel_bias = build.tensor("conv1d.bias", (inner,)) if build.has("conv1d.bias") else None
        precise = torch.float64 if build.dtype == torch.float64 else torch.float32
        conv = TensorSpec("conv", (shape.inner, shape.width - 1), str(precise).removeprefix("torch."))
        self.states: tuple[StateSpec, ...] = (Recurrent((conv,)),)
        self._conv = build.bind(causal_conv)
        self._gate = build.bind(activate_mul)

    def plan(self, batch: Batch, groups: Sequence[int | None]) -> RecurrentMeta:
        return recurrent_plan(batch)

    def run(self, x: Tensor, states: LayerStates, meta: RecurrentMeta, angles: Angles | None) -> Tensor:
        (state,) = states
        near = self._conv(self.into(x), self.kernel, self.kernel_bias, state["conv"], meta)
        return self.out(self._gate(self.gate(x), near, "silu"))
