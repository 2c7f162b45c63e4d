"""Which type each unit of a model gets, so that the whole fits a budget and loses least: an integer program.

Losses of units are added. For small losses that is accurate: each rounding moves the logits a little, in a direction of
its own. The program is solved to proven optimality by HiGHS, which `scipy` carries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bankfull.errors import ConfigError

TRIES = 8


@dataclass(frozen=True, slots=True)
class PricedType:
    """One way to store a unit."""

    name: str
    nbytes: int
    loss: float


@dataclass(frozen=True, slots=True)
class Budget:
    """Exactly one bound is set."""

    bits: float | None = None
    """Mean bits per weight of the layers' matrices, scales included."""
    size: int | None = None
    """Bytes of the whole model."""
    kl: float | None = None
    """Divergence from the unrounded model, in nats per token; the smallest model within it is wanted."""

    def __post_init__(self) -> None:
        given = {name: value for name, value in self._bounds().items() if value is not None}
        if len(given) != 1:
            raise ConfigError("Mixed bits need one budget: --bits 3.5, --size 4GiB or --kl 0.02.")
        ((name, value),) = given.items()
        if not 0 < value < math.inf:
            raise ConfigError(f"--{name} {value} is no budget; give a number above 0.")

    def _bounds(self) -> dict[str, float | None]:
        return {"bits": self.bits, "size": self.size, "kl": self.kl}


def least_loss(units: Sequence[Sequence[PricedType]], most_bytes: int) -> list[PricedType]:
    """One type for each unit: the least total loss within `most_bytes`."""
    least = sum(min(one.nbytes for one in types) for types in units)
    if least > most_bytes:
        raise ConfigError(
            f"The smallest types need {least} bytes, more than the budget of {most_bytes}; raise the budget."
        )
    return _solved(units, lambda one: one.loss, lambda one: one.nbytes, most_bytes)


def fewest_bytes(units: Sequence[Sequence[PricedType]], most_loss: float) -> list[PricedType]:
    """One type for each unit: the fewest bytes within a total loss of `most_loss`."""
    least = math.fsum(min(one.loss for one in types) for types in units)
    if least > most_loss:
        raise ConfigError(
            f"Even the widest types lose {least:.3g}, more than the budget of {most_loss:g}; raise the budget."
        )
    return _solved(units, lambda one: one.nbytes, lambda one: one.loss, most_loss)


def _solved(units: Sequence[Sequence[PricedType]], goal: Any, price: Any, most: float) -> list[PricedType]:
    """Minimizes the sum of `goal` with a sum of `price` of at most `most`."""
    milp, bounds, constraint = _solver()
    every = [(number, one) for number, types in enumerate(units) for one in types]
    goals = np.array([goal(one) for _, one in every], np.float64)
    prices = np.array([price(one) for _, one in every], np.float64)
    belongs = np.zeros((len(units), len(every)))
    for column, (number, _) in enumerate(every):
        belongs[number, column] = 1.0
    # The solver's tolerances are absolute, so both sums are scaled to about one.
    goal_scale, price_scale = max(goals.max(initial=0.0), 1e-300), max(most, prices.max(initial=0.0) * 1e-9, 1e-300)
    limit = most
    for _ in range(TRIES):
        solution = milp(
            goals / goal_scale,
            integrality=np.ones(len(every)),
            bounds=bounds(0, 1),
            constraints=[
                constraint(belongs, 1, 1),
                constraint(prices[None] / price_scale, -np.inf, limit / price_scale),
            ],
            options={"mip_rel_gap": 0.0},
        )
        if solution.x is None:
            break
        chosen: list[PricedType] = [units[number][0] for number in range(len(units))]
        for (number, one), share in zip(every, solution.x, strict=True):
            if share > 0.5:
                chosen[number] = one
        spent = math.fsum(price(one) for one in chosen)
        if spent <= most:
            return chosen
        # Within the solver's tolerance, but not within the budget: ask for what lies beyond the tolerance.
        limit -= 2 * (spent - most) + 1e-9 * price_scale
    return [min(types, key=price) for types in units]


def _solver() -> tuple[Any, Any, Any]:
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ImportError:
        raise ConfigError(
            "Mixed bits need scipy for their integer program: pip install 'bankfull[quantize]'."
        ) from None
    return milp, Bounds, LinearConstraint
