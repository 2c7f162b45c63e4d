"""Gated delta net: a short causal convolution, the gated delta rule, and a gated norm of each head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bankfull.axes import HEAD, HEADS, PARTS, TAPS, WeightAxis, joined
from bankfull.errors import ModelError
from bankfull.layers.batch import Batch
from bankfull.layers.build import Build
from bankfull.layers.linear import Linear, split_linear, stack
from bankfull.layers.mixer import Angles, recurrent_plan
from bankfull.ops import RecurrentMeta, causal_conv_silu, delta_rule, gated_rms_norm
from bankfull.state.spec import Recurrent, StateSpec, TensorSpec
from bankfull.state.storage import LayerStates


@dataclass(frozen=True, slots=True)
class DeltaShape:
    hidden: int
    key_heads: int
    """Heads of queries and keys; each serves heads / key_heads consecutive heads of the values."""
    heads: int
    """Heads of the values."""
    key: int
    """Elements of a head's query and key."""
    value: int
    """Elements of a head's value."""
    width: int = 4
    """Tokens in the convolution's window."""
    eps: float = 1e-6
    """Epsilon of the output norm."""

    @property
    def values(self) -> WeightAxis:
        """The axis of all heads' values."""
        return HEADS(self.heads, self.value)

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return int(self.convolved)

    @property
    def convolved(self) -> WeightAxis:
        """The axis of these channels: queries, keys and values."""
        queries = HEADS(self.key_heads, self.key)
        return joined(queries, queries, self.values)

    def by_key_head(self, rows: int) -> WeightAxis:
        """An axis of so many rows, those of each key head side by side."""
        return HEADS(self.key_heads, rows // self.key_heads)


class DeltaMixer:
    rope: str | None = None

    def __init__(self, build: Build, shape: DeltaShape) -> None:
        if shape.heads % shape.key_heads:
            raise ModelError(
                f"The model's configuration has {shape.heads} value heads in its delta layers, which "
                f"{shape.key_heads} key heads cannot share."
            )
        self.shape = shape
        hidden, heads = shape.hidden, HEADS(shape.heads)
        self.qkv, self.z = self._qkv_and_gate(build)
        order = _grouped(shape, (1, 1))
        both, at = joined(heads, heads), build.at("in_proj_ba")
        (self.ba,) = split_linear(at, hidden, [both], order=order, stored=shape.by_key_head(both))
        self.all = stack(build, (self.qkv, self.z, self.ba))
        self.out = Linear(build.at("out_proj"), shape.values, hidden)
        self.norm = build.tensor("norm.weight", (HEAD(shape.value),)).repeat(shape.heads)
        self.kernel = build.tensor("conv1d.weight", (shape.convolved, PARTS(1), TAPS(shape.width)))[:, 0]
        # Decays over thousands of tokens lose too much in 16 bits.
        precise = torch.float64 if build.dtype == torch.float64 else torch.float32
        if build.has("A"):
            self.rate = build.tensor("A", (heads,), precise)
        else:
            self.rate = -torch.exp(build.tensor("A_log", (heads,), precise))
        shift = "dt_proj.bias" if build.has("dt_proj.bias") else "dt_bias"
        self.shift = build.tensor(shift, (heads,), precise)
        dtype = str(precise).removeprefix("torch.")
        conv = TensorSpec("conv", (shape.channels, shape.width - 1), dtype)
        state = TensorSpec("state", (shape.heads, shape.key, shape.value), dtype)
        self.states: tuple[StateSpec, ...] = (Recurrent((conv, state)),)
        self._parts = [int(part) for part in shape.convolved.parts]
        self._conv = build.bind(causal_conv_silu)
        self._mix = build.bind(delta_rule)
        self._norm = build.bind(gated_rms_norm)

    def _qkv_and_gate(self, build: Build) -> tuple[Linear, Linear]:
        """The input of the convolution and the output gate. One matrix has the rows of query, key, values and gate side
        by side for each key head; files with two matrices have them in order."""
        shape, hidden = self.shape, self.shape.hidden
        if build.has("in_proj_qkv.weight"):
            qkv = Linear(build.at("in_proj_qkv"), hidden, shape.convolved)
            return qkv, Linear(build.at("in_proj_z"), hidden, shape.values)
        share = shape.heads // shape.key_heads * shape.value
        order = _grouped(shape, (shape.key, shape.key, share, share), per_head=False)
        outers, at = (shape.convolved, shape.values), build.at("in_proj_qkvz")
        qkv, z = split_linear(at, hidden, outers, order=order, stored=shape.by_key_head(sum(outers)))
        return qkv, z

    def plan(self, batch: Batch, groups: Sequence[int | None]) -> RecurrentMeta:
        return recurrent_plan(batch)

    def run(self, x: Tensor, states: LayerStates, meta: RecurrentMeta, angles: Angles | None) -> Tensor:
        shape, (state,) = self.shape, states
        if self.all is None:
            qkv, z, ba = self.qkv(x), self.z(x), self.ba(x)
        else:
            qkv, z, ba = self.all(x).split((shape.channels, shape.heads * shape.value, 2 * shape.heads), -1)
        near = self._conv(qkv, self.kernel, None, state["conv"], meta)
        q, k, v = near.split(self._parts, -1)
        b, a = ba.split(shape.heads, -1)
        y = self._mix(
            q.unflatten(-1, (-1, shape.key)),
            k.unflatten(-1, (-1, shape.key)),
            v.unflatten(-1, (-1, shape.value)),
            a,
            b,
            self.rate,
            self.shift,
            state["state"],
            meta,
        )
        return self.out(self._norm(y.flatten(1), z, self.norm, shape.eps, shape.heads, True))


def _grouped(shape: DeltaShape, sizes: Sequence[int], per_head: bool = True) -> Tensor:
    """The order of rows that are stored group by group for each key head: all rows of the first group, then those of
    the second, ... `sizes`: rows of each group, for one head of the values or for one key head."""
    each = [size * (shape.heads // shape.key_heads if per_head else 1) for size in sizes]
    rows = torch.arange(shape.key_heads * sum(each)).view(shape.key_heads, sum(each))
    return torch.cat([part.flatten() for part in rows.split(each, 1)])
