"""Attention whose result is gated before the output projection (Qwen3-Next)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bankfull.layers.attention import Attention, Heads
from bankfull.layers.build import Build
from bankfull.layers.linear import Linear
from bankfull.layers.mixer import Angles
from bankfull.ops import PagedMeta, activate_mul
from bankfull.state.storage import LayerStates


class GatedAttention(Attention):
    """out(sigmoid(gate(x)) * attention(x))"""

    def __init__(
        self, build: Build, heads: Heads, q: Linear, k: Linear, v: Linear, out: Linear, gate: Linear, **more: Any
    ) -> None:
        super().__init__(build, heads, q, k, v, out, **more)
        self.gate = gate
        self._multiply = build.bind(activate_mul)

    def norms(self, rows: int) -> bool:
        return False  # the gate reads normed rows, too

    def run(self, x: Any, states: LayerStates, meta: PagedMeta, angles: Angles | None) -> Tensor:
        return self.out(self._multiply(self.gate(x), self.mixed(x, states, meta, angles), "sigmoid"))
