"""Feed-forward layers."""

from __future__ import annotations

from torch import Tensor

from bankfull.errors import ModelError
from bankfull.layers.build import Build
from bankfull.layers.linear import GatedLinear, Linear, stack
from bankfull.ops import ACTIVATIONS, Unnormed, activate, activate_mul


def activation(name: str) -> str:
    if name not in ACTIVATIONS:
        raise ModelError(f"Activation {name!r} is not supported; supported are {', '.join(sorted(ACTIVATIONS))}.")
    return ACTIVATIONS[name]


class GatedMLP:
    """down(f(gate(x)) * up(x))"""

    def __init__(self, build: Build, gate: Linear, up: Linear, down: Linear, kind: str, stacks: bool = True) -> None:
        """`stacks`: whether gate and up may become one matrix."""
        self.kind = activation(kind)
        self.gate, self.up, self.down = gate, up, down
        self._mul = build.bind(activate_mul)
        both = stack(build, (gate, up)) if stacks else None
        self.both = None if both is None else GatedLinear(build, both, self.kind)

    def __call__(self, x: Tensor | Unnormed) -> Tensor:
        if self.both is not None:
            return self.down(self.both(x))
        return self.down(self.multiply(self.gate(x), self.up(x)))

    def multiply(self, gate: Tensor, up: Tensor) -> Tensor:
        """f(gate) * up"""
        product: Tensor = self._mul(gate, up, self.kind)
        return product

    def norms(self, rows: int) -> bool:
        return self.both is not None and self.both.norms(rows)


class MLP:
    """down(f(up(x)))"""

    def __init__(self, build: Build, up: Linear, down: Linear, kind: str) -> None:
        self.up, self.down = up, down
        self.kind = activation(kind)
        self._activate = build.bind(activate)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self._activate(self.up(x), self.kind))
