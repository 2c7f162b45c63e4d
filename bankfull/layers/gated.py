"""Attention whose result is gated before the output projection (Qwen3-Next)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bankfull.layers.attention import Attention, Heads
from bankfull.layers.build import Build
from bankfull.layers.linear import Linear
from bankfull.ops import activate_mul


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

    def result(self, x: Any, mixed: Tensor) -> Tensor:
        return self.out(self._multiply(self.gate(x), mixed, "sigmoid"))
