"""Mamba's mixer: a gate, a short causal convolution, and a selective scan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bankfull.layers.batch import Batch
from bankfull.layers.build import Build
from bankfull.layers.linear import Linear, split_linear
from bankfull.layers.mixer import Angles
from bankfull.ops import RecurrentMeta, activate, activate_mul, causal_conv, selective_scan
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

    def __init__(self, build: Build, shape: MambaShape, *, bias: bool, conv_bias: bool) -> None:
        inner = shape.inner
        self.shape = shape
        self.into, self.gate = split_linear(build.at("in_proj"), shape.hidden, [inner, inner], bias)
        self.project = Linear(build.at("x_proj"), inner, shape.rank + 2 * shape.state)
        self.step = Linear(build.at("dt_proj"), shape.rank, inner, bias=True)
        self.out = Linear(build.at("out_proj"), inner, shape.hidden, bias)
        self.kernel = build.tensor("conv1d.weight", (inner, 1, shape.width))[:, 0]
        self.kernel_bias = build.tensor("conv1d.bias", (inner,)) if conv_bias else None
        # Decays over thousands of tokens lose too much in 16 bits.
        precise = torch.float64 if build.dtype == torch.float64 else torch.float32
        if build.has("A"):
            self.decay = build.tensor("A", (inner, shape.state), precise)
        else:
            self.decay = -torch.exp(build.tensor("A_log", (inner, shape.state), precise))
        self.skip = build.tensor("D", (inner,), precise)
        dtype = str(precise).removeprefix("torch.")
        conv = TensorSpec("conv", (inner, shape.width - 1), dtype)
        ssm = TensorSpec("ssm", (inner, shape.state), dtype)
        self.states: tuple[StateSpec, ...] = (Recurrent((conv, ssm)),)
        self._conv = build.bind(causal_conv)
        self._scan = build.bind(selective_scan)
        self._activate = build.bind(activate)
        self._gate = build.bind(activate_mul)

    def plan(self, batch: Batch, groups: Sequence[int | None]) -> RecurrentMeta:
        assert batch.read is not None and batch.write is not None, "a batch without slots for recurrent state"
        return RecurrentMeta(batch.q_start, batch.kept, batch.read, batch.write, batch.starts, batch.kepts)

    def run(self, x: Tensor, states: LayerStates, meta: RecurrentMeta, angles: Angles | None) -> Tensor:
        shape, (state,) = self.shape, states
        u = self._activate(self._conv(self.into(x), self.kernel, self.kernel_bias, state["conv"], meta), "silu")
        low, b, c = self.project(u).split((shape.rank, shape.state, shape.state), dim=-1)
        delta = self._activate(self.step(low), "softplus")
        y = self._scan(u, delta, self.decay, b, c, self.skip, state["ssm"], meta)
        return self.out(self._gate(self.gate(x), y, "silu"))
