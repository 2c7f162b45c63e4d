"""Feed-forward layers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from bankfull.axes import NEURONS
from bankfull.errors import ModelError
from bankfull.layers.build import Build
from bankfull.layers.linear import GatedLinear, Linear, split_linear, stack
from bankfull.layers.placement import Role
from bankfull.ops import ACTIVATIONS, Unnormed, activate, activate_mul

NAMES = ("gate_proj", "up_proj", "down_proj")
"""The matrices of a gated layer in most families; two names where one matrix holds gate and up."""


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

    @staticmethod
    def read(
        build: Build,
        hidden: int,
        inner: int,
        kind: str,
        names: Sequence[str] = NAMES,
        bias: bool = False,
        stacks: bool = True,
    ) -> GatedMLP:
        """The layer whose matrices have these names below `build`."""
        build, (*enter, leave), inner = build.of(Role.FEED), names, NEURONS(inner)
        if len(enter) == 1:
            gate, up = split_linear(build.at(enter[0]), hidden, [inner, inner], bias, (True, True))
        else:
            gate, up = (Linear(build.at(name), hidden, inner, bias, int8_when_batched=True) for name in enter)
        # Rounding the inputs of the last matrix would cost a third of all accuracy loss.
        return GatedMLP(build, gate, up, Linear(build.at(leave), inner, hidden, bias), kind, stacks)

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

    @staticmethod
    def read(
        build: Build,
        hidden: int,
        inner: int,
        kind: str,
        names: tuple[str, str],
        bias: bool = False,
        int8_when_batched: bool = True,
    ) -> MLP:
        """The layer whose matrices have these names below `build`."""
        build, inner = build.of(Role.FEED), NEURONS(inner)
        up = Linear(build.at(names[0]), hidden, inner, bias, int8_when_batched=int8_when_batched)
        return MLP(build, up, Linear(build.at(names[1]), inner, hidden, bias), kind)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self._activate(self.up(x), self.kind))
