"""Mamba's mixer: a gate, a short causal convolution, and a selective scan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bankfull.axes import CHANNELS, LATENT, PARTS, STATE, TAPS, joined
from bankfull.layers.batch import Batch
from bankfull.layers.build import Build
from bankfull.layers.linear import Linear, split_linear
from bankfull.layers.mixer import Angles, recurrent_plan
from bankfull.layers.norm import RMSNorm
from bankfull.ops import RecurrentMeta, activate, activate_mul, causal_conv_silu, selective_scan
from bankfull.state.spec import Recurrent, StateSpec, TensorSpec
from bankfull.state.storage import LayerStates


@dataclass(frozen=True, slots=True)
class MambaShape:
    hidden: int
    inner: int
    """Channels of the convolution and of the recurrence."""
    state: int
    """State size of each channel."""
    rank: int
    """Rank of the projection to the channels' time steps."""
    width: int
    """Tokens in the convolution's window."""


class MambaMixer:
    rope: str | None = None

    def __init__(
        self, build: Build, shape: MambaShape, *, bias: bool, conv_bias: bool, norm_eps: float | None = None
    ) -> None:
        """`norm_eps`: where time steps, B and C are normed after their projection (Jamba), the eps of these norms."""
        inner, hidden = CHANNELS(shape.inner), shape.hidden
        rank, numbers = LATENT(shape.rank), STATE(shape.state)
        self.shape = shape
        self.into, self.gate = split_linear(build.at("in_proj"), hidden, [inner, inner], bias)
        # A CPU's tape norms whole results, so each part that is normed gets a product of its own.
        self.parts = (shape.rank, shape.state, shape.state)
        apart = norm_eps is not None and not build.kit.stacks
        sizes = [rank, numbers, numbers] if apart else [joined(rank, numbers, numbers)]
        self.project = split_linear(build.at("x_proj"), inner, sizes)
        self.step = Linear(build.at("dt_proj"), rank, inner, bias=True)
        self.out = Linear(build.at("out_proj"), inner, hidden, bias)
        self.kernel = build.tensor("conv1d.weight", (inner, PARTS(1), TAPS(shape.width)))[:, 0]
        self.kernel_bias = build.tensor("conv1d.bias", (inner,)) if conv_bias else None
        # Decays over thousands of tokens lose too much in 16 bits.
        precise = torch.float64 if build.dtype == torch.float64 else torch.float32
        if build.has("A"):
            self.decay = build.tensor("A", (inner, numbers), precise)
        else:
            self.decay = -torch.exp(build.tensor("A_log", (inner, numbers), precise))
        self.skip = build.tensor("D", (inner,), precise)
        dtype = str(precise).removeprefix("torch.")
        conv = TensorSpec("conv", (shape.inner, shape.width - 1), dtype)
        ssm = TensorSpec("ssm", (shape.inner, shape.state), dtype)
        self.states: tuple[StateSpec, ...] = (Recurrent((conv, ssm)),)
        names = zip(("dt_layernorm", "b_layernorm", "c_layernorm"), (rank, numbers, numbers), strict=True)
        self.norms_of_parts = None if norm_eps is None else [RMSNorm(build.at(name), n, norm_eps) for name, n in names]
        self._conv = build.bind(causal_conv_silu)
        self._scan = build.bind(selective_scan)
        self._activate = build.bind(activate)
        self._gate = build.bind(activate_mul)

    def plan(self, batch: Batch, groups: Sequence[int | None]) -> RecurrentMeta:
        return recurrent_plan(batch)

    def run(self, x: Tensor, states: LayerStates, meta: RecurrentMeta, angles: Angles | None) -> Tensor:
        (state,) = states
        u = self._conv(self.into(x), self.kernel, self.kernel_bias, state["conv"], meta)
        products = [product(u) for product in self.project]
        low, b, c = products if len(products) > 1 else products[0].split(self.parts, dim=-1)
        if self.norms_of_parts is not None:
            low, b, c = (norm(part) for norm, part in zip(self.norms_of_parts, (low, b, c), strict=True))
        delta = self._activate(self.step(low), "softplus")
        y = self._scan(u, delta, self.decay, b, c, self.skip, state["ssm"], meta)
        return self.out(self._gate(self.gate(x), y, "silu"))
