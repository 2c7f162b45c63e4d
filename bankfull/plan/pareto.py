"""The Pareto front of outcomes, and the recommendation for a goal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from bankfull.errors import ConfigError

if TYPE_CHECKING:
    from bankfull.plan.outcome import SimulatedOutcome

GOALS = ("goodput", "cost", "efficiency", "latency")
CLOSE = 0.02
"""Relative difference within the noise of simulations."""
NEARLY = 0.05
"""Relative loss in the goal that is accepted to lose less accuracy."""
Axes = tuple[float | None, ...]
"""Smaller is better; None = unknown."""


def dominates(one: Axes, other: Axes) -> bool:
    """Whether the first is at least as good on every axis and better on one. An axis known for only one of them
    prevents comparison."""
    if any((a is None) != (b is None) for a, b in zip(one, other, strict=True)):
        return False
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    return all(_ratio(a, b) <= 1 + CLOSE for a, b in pairs) and any(_ratio(a, b) < 1 - CLOSE for a, b in pairs)


def _ratio(one: float, other: float) -> float:
    """Below 1 if `one` is better. Axes on which more is better are negative."""
    if one == other:
        return 1.0
    if one < 0 or other < 0:
        return other / one if one else float("inf")
    return one / other if other else float("inf")


def front(outcomes: Sequence[SimulatedOutcome]) -> list[SimulatedOutcome]:
    """Outcomes that no other dominates; the first of equal ones."""
    kept: list[SimulatedOutcome] = []
    for outcome in outcomes:
        if not any(dominates(other.axes, outcome.axes) for other in outcomes) and not any(
            _same(other.axes, outcome.axes) for other in kept
        ):
            kept.append(outcome)
    return kept


def _same(one: Axes, other: Axes) -> bool:
    return all(
        a == b if a is None or b is None else abs(_ratio(a, b) - 1) <= CLOSE for a, b in zip(one, other, strict=True)
    )


def recommend(outcomes: Sequence[SimulatedOutcome], goal: str) -> SimulatedOutcome | None:
    """The best outcome that this version can run; outcomes that meet the objectives come first."""
    if goal not in GOALS:
        raise ConfigError(f"The goal {goal[:40]!r} is unknown; use {', '.join(GOALS)}.")
    possible = [outcome for outcome in outcomes if outcome.configuration.not_yet is None]
    if goal == "cost" and possible and all(outcome.dollars_per_million is None for outcome in possible):
        raise ConfigError("--goal cost needs a price: give --price, in dollars per hour, or devices of the catalogue.")
    best = min(possible, key=ORDER[goal], default=None)
    if best is None:
        return None
    # Simulations are not exact: prefer a nearly equal outcome that loses less or uses default settings.
    leading = MEASURE[goal](best)
    near = [o for o in possible if o.met == best.met and _ratio(MEASURE[goal](o), leading) <= 1 + NEARLY]
    return min(near, key=lambda outcome: (_loss(outcome), not outcome.configuration.usual, *ORDER[goal](outcome)))


def _unmet(outcome: SimulatedOutcome) -> tuple[bool, float]:
    """Equal for all that meet the objectives; otherwise ordered by attainment."""
    return not outcome.met, 0.0 if outcome.met else -round(outcome.attainment, 2)


def _cost(outcome: SimulatedOutcome) -> float:
    return float("inf") if outcome.dollars_per_million is None else outcome.dollars_per_million


def _loss(outcome: SimulatedOutcome) -> float:
    """What no table orders counts as the largest."""
    order = outcome.configuration.prepared.loss.order
    return float("inf") if order is None else order


def _by_goodput(outcome: SimulatedOutcome) -> tuple[object, ...]:
    goodput = -round(outcome.goodput, 3)
    return (*_unmet(outcome), goodput, _cost(outcome), _loss(outcome), outcome.memory, outcome.e2e_p99)


def _by_cost(outcome: SimulatedOutcome) -> tuple[object, ...]:
    return (*_unmet(outcome), _cost(outcome), _loss(outcome), -outcome.goodput, outcome.memory)


def _by_efficiency(outcome: SimulatedOutcome) -> tuple[object, ...]:
    return (*_unmet(outcome), outcome.device_seconds, _loss(outcome), outcome.e2e_p99, outcome.memory)


def _by_latency(outcome: SimulatedOutcome) -> tuple[object, ...]:
    return (*_unmet(outcome), outcome.e2e_p99, _loss(outcome), _cost(outcome), outcome.memory)


ORDER: dict[str, Callable[[SimulatedOutcome], tuple[object, ...]]] = {
    "goodput": _by_goodput,
    "cost": _by_cost,
    "efficiency": _by_efficiency,
    "latency": _by_latency,
}
MEASURE: dict[str, Callable[[SimulatedOutcome], float]] = {
    "goodput": lambda outcome: -max(outcome.goodput, 1e-9),
    "cost": _cost,
    "efficiency": lambda outcome: outcome.device_seconds,
    "latency": lambda outcome: outcome.e2e_p99,
}
"""The quantity that each goal minimizes."""


def usual_goal(objectives: bool, priced: bool) -> str:
    """Without objectives goodput is undefined: minimize dollars per token if all prices are known, otherwise device
    time per token."""
    return "goodput" if objectives else "cost" if priced else "efficiency"
