"""S4's mixer with a diagonal state (S4D): a linear recurrence whose dynamics do not depend on the input.

Training uses it as a convolution; here it runs as a recurrence with a state of constant size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bankfull.axes import HIDDEN, PARTS, STATE
from bankfull.errors import ModelError
from bankfull.layers.batch import Batch
from bankfull.layers.build import Build
from bankfull.layers.linear import Linear
from bankfull.layers.mixer import Angles, recurrent_plan
from bankfull.ops import RecurrentMeta, activate, diagonal_scan
from bankfull.state.spec import Recurrent, StateSpec, TensorSpec
from bankfull.state.storage import LayerStates

RULES = ("zoh", "bilinear")


@dataclass(frozen=True, slots=True)
class S4Shape:
    hidden: int
    """Channels. Each has a state of its own."""
    state: int
    """Real numbers in the state of a channel: twice the number of conjugate pairs."""
    rule: str = "zoh"
    """How the continuous dynamics become steps: zoh (zero-order hold) or bilinear."""

    def __post_init__(self) -> None:
        if self.state % 2:
            raise ModelError(f"The state size of S4 is {self.state}, but it must be even: it consists of pairs.")
        if self.rule not in RULES:
            raise ModelError(f"The discretization {self.rule!r} of S4 is not supported; use {' or '.join(RULES)}.")

    @property
    def pairs(self) -> int:
        return self.state // 2


def discretized(a: Tensor, b: Tensor, step: Tensor, rule: str) -> tuple[Tensor, Tensor]:
    """The factor and the input factor of a step of h' = a h + b u, for complex a and b."""
    if rule == "zoh":
        decay = torch.exp(step * a)
        return decay, (decay - 1.0) / a * b
    return (1.0 + step * a / 2) / (1.0 - step * a / 2), step * b / (1.0 - step * a / 2)


class S4Mixer:
    """out_proj(gelu(y)), where y is the recurrence over each channel of the input.

    Tensors: log_dt (hidden), log_A_real and A_imag (hidden, pairs): A = -exp(log_A_real) + i A_imag; C (hidden,
    pairs, 2), and B of the same shape where the file has it (else 1); D (hidden); out_proj.
    """

    rope: str | None = None

    def __init__(self, build: Build, shape: S4Shape, *, bias: bool = True) -> None:
        hidden, pairs = HIDDEN(shape.hidden), STATE(shape.pairs)
        self.shape = shape
        exact = torch.float64  # a rounded decay is raised to the power of the sequence's length
        step = torch.exp(build.tensor("log_dt", (hidden,), exact))[:, None]
        rate = -torch.exp(build.tensor("log_A_real", (hidden, pairs), exact))
        a = torch.complex(rate, build.tensor("A_imag", (hidden, pairs), exact))
        b = torch.ones_like(a)
        if build.has("B"):
            b = torch.view_as_complex(build.tensor("B", (hidden, pairs, PARTS(2)), exact))
        c = torch.view_as_complex(build.tensor("C", (hidden, pairs, PARTS(2)), exact))
        decay, enter = discretized(a, b, step, shape.rule)
        precise = torch.float64 if build.dtype == torch.float64 else torch.float32
        # One number stands for a conjugate pair: their sum is twice the real part.
        self.decay, self.leave = (
            torch.stack((number.real, number.imag)).transpose(1, 2).to(precise).contiguous()
            for number in (decay, 2.0 * c * enter)
        )
        self.skip = build.tensor("D", (hidden,), precise)
        self.out = Linear(build.at("out_proj"), hidden, hidden, bias)
        state = TensorSpec("s4", (2, shape.pairs, shape.hidden), str(precise).removeprefix("torch."))
        self.states: tuple[StateSpec, ...] = (Recurrent((state,)),)
        self._scan = build.bind(diagonal_scan)
        self._activate = build.bind(activate)

    def plan(self, batch: Batch, groups: Sequence[int | None]) -> RecurrentMeta:
        return recurrent_plan(batch)

    def run(self, x: Tensor, states: LayerStates, meta: RecurrentMeta, angles: Angles | None) -> Tensor:
        (state,) = states
        y = self._scan(x, self.decay, self.leave, self.skip, state["s4"], meta)
        return self.out(self._activate(y, "gelu"))
