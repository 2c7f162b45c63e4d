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

    def __init__(self, build: Build, gate: Linear, up: Linear, down: Linear, kind: str) -> None:
        self.kind = activation(kind)
        self.gate, self.up, self.down = gate, up, down
        self._mul = build.bind(activate_mul)
        both = stack(build, (gate, up))
        self.both = None if both is None else GatedLinear(build, both, self.kind)

    def __call__(self, x: Tensor | Unnormed) -> Tensor:
        if self.both is not None:
            return self.down(self.both(x))
        return self.down(self._mul(self.gate(x), self.up(x), self.kind))

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
