"""Mamba-2's mixer: one projection to gate, convolution and time steps; a recurrence per head; a gated norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor

from bankfull.axes import GROUPS, HEADS, PARTS, TAPS, joined
from bankfull.errors import ModelError
from bankfull.layers.batch import Batch
from bankfull.layers.build import Build
from bankfull.layers.linear import Linear
from bankfull.layers.mixer import Angles, recurrent_plan
from bankfull.ops import (
    RecurrentMeta,
    activate_mul,
    causal_conv_silu,
    gated_rms_norm,
    scale_columns,
    spread_rms_norm,
    ssd_scan,
)
from bankfull.state.spec import Recurrent, StateSpec, TensorSpec
from bankfull.state.storage import LayerStates


@dataclass(frozen=True, slots=True)
class Mamba2Shape:
    hidden: int
    heads: int
    size: int
    """Channels of each head."""
    groups: int
    """Groups of heads that share the input and output vectors (B and C) of the state."""
    state: int
    """State size of each channel."""
    width: int = 4
    """Tokens in the convolution's window."""

    def __post_init__(self) -> None:
        if self.heads % self.groups:
            raise ModelError(
                f"The model's configuration has {self.heads} Mamba heads, which {self.groups} groups cannot share."
            )

    @property
    def inner(self) -> int:
        """Channels of all heads."""
        return self.heads * self.size

    @property
    def channels(self) -> int:
        """Channels of the convolution: those of the heads, and B and C of each group."""
        return self.inner + 2 * self.groups * self.state


@dataclass(frozen=True, slots=True)
class GatedNorm:
    """The norm between the recurrence and the output projection."""

    eps: float
    groups: int = 1
    """Equal parts of a row that are normed separately."""
    before_gate: bool = False
    """Whether the gate is applied to the normed rows instead of before the norm."""
    across_ranks: bool = False
    """Whether the columns of its one group are spread over tensor ranks."""


class Mamba2Mixer:
    rope: str | None = None

    def __init__(
        self,
        build: Build,
        shape: Mamba2Shape,
        *,
        norm: GatedNorm | None,
        bias: bool = False,
        out_bias: bool | None = None,
        conv_bias: bool = True,
        limits: tuple[float, float] = (0.0, inf),
        scales: Sequence[float] | None = None,
    ) -> None:
        """`norm`: None = only the gate. `out_bias`: None = as `bias`. `limits`: of the time steps. `scales`: factors of
        the projection's outputs: gate, x, B, C, time steps."""
        inner, heads = HEADS(shape.heads, shape.size), HEADS(shape.heads)
        shared, hidden = GROUPS(shape.groups, shape.state), shape.hidden
        channels = joined(inner, shared, shared)
        if norm is not None and inner % norm.groups:
            raise ModelError(
                f"The model's configuration has {inner} Mamba channels, which do not divide into {norm.groups} groups."
            )
        self.shape, self.norm, self.limits = shape, norm, limits
        self.into = Linear(build.at("in_proj"), hidden, joined(inner, channels, heads), bias)
        self.out = Linear(build.at("out_proj"), inner, hidden, bias if out_bias is None else out_bias)
        self.kernel = build.tensor("conv1d.weight", (channels, PARTS(1), TAPS(shape.width)))[:, 0]
        self.kernel_bias = build.tensor("conv1d.bias", (channels,)) if conv_bias else None
        self.weight = None if norm is None else build.tensor("norm.weight", (inner,))
        # Decays over thousands of tokens lose too much in 16 bits.
        precise = torch.float64 if build.dtype == torch.float64 else torch.float32
        self.decay = (
            build.tensor("A", (heads,), precise)
            if build.has("A")
            else -torch.exp(build.tensor("A_log", (heads,), precise))
        )
        self.skip = build.tensor("D", (heads,), precise)
        self.bias = build.tensor("dt_bias", (heads,), precise)
        self.scales: Tensor | None = None
        if scales is not None and any(scale != 1.0 for scale in scales):
            counts = (inner, inner, shared, shared, heads)
            parts = [torch.full((n,), s, dtype=precise) for n, s in zip(counts, scales, strict=True)]
            self.scales = torch.cat(parts).to(build.dtype).to(build.device)
        dtype = str(precise).removeprefix("torch.")
        conv = TensorSpec("conv", (shape.channels, shape.width - 1), dtype)
        ssm = TensorSpec("ssm", (shape.heads, shape.size, shape.state), dtype)
        self.states: tuple[StateSpec, ...] = (Recurrent((conv, ssm)),)
        self._conv = build.bind(causal_conv_silu)
        self._scan = build.bind(ssd_scan)
        self._scale = build.bind(scale_columns)
        self._norm = build.bind(gated_rms_norm)
        self._gate = build.bind(activate_mul)
        self._spread = build.bind(spread_rms_norm) if norm is not None and norm.across_ranks else None
        self._group = None if build.shard is None else build.shard.group

    def plan(self, batch: Batch, groups: Sequence[int | None]) -> RecurrentMeta:
        return recurrent_plan(batch)

    def norms(self, rows: int) -> bool:
        """Whether `run` takes this many rows `Unnormed`."""
        return self.into.norms(rows)

    def run(self, x: Any, states: LayerStates, meta: RecurrentMeta, angles: Angles | None) -> Tensor:
        shape, (state,) = self.shape, states
        whole = self.into(x)
        if self.scales is not None:
            whole = self._scale(whole, self.scales)
        gate, mixed, dt = whole.split((shape.inner, shape.channels, shape.heads), dim=-1)
        mixed = self._conv(mixed, self.kernel, self.kernel_bias, state["conv"], meta)
        u, b, c = mixed.split((shape.inner, shape.groups * shape.state, shape.groups * shape.state), dim=-1)
        u = u.unflatten(-1, (shape.heads, shape.size))
        b, c = (part.unflatten(-1, (shape.groups, shape.state)) for part in (b, c))
        y = self._scan(u, dt, self.decay, b, c, self.skip, self.bias, self.limits, state["ssm"], meta).flatten(1)
        if self.norm is None:
            return self.out(self._gate(gate, y, "silu"))
        norm = self.norm
        if self._spread is not None:
            y = y if norm.before_gate else self._gate(gate, y, "silu")
            y = self._spread(y, self.weight, norm.eps, 0.0, self._group)
            return self.out(self._gate(gate, y, "silu") if norm.before_gate else y)
        return self.out(self._norm(y, gate, self.weight, norm.eps, norm.groups, norm.before_gate))
