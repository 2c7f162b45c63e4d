"""The arithmetic of measurements: spreads, and shares of a limit. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from bankfull.errors import ConfigError
from bankfull.limits.machine.ceilings import Ceilings
from bankfull.ops.cost import Cost
from bankfull.ops.registry import FLOAT


@dataclass(frozen=True, slots=True)
class Spread:
    """Repetitions of one figure: the median, the quartiles and the extremes."""

    median: float
    low: float
    lower: float
    upper: float
    high: float
    count: int


def spread(values: Sequence[float]) -> Spread:
    if not values:
        raise ConfigError("There is nothing to summarize: no repetition gave this figure.")
    ranked = sorted(values)
    return Spread(median(ranked), ranked[0], quantile(ranked, 0.25), quantile(ranked, 0.75), ranked[-1], len(ranked))


def quantile(ranked: Sequence[float], share: float) -> float:
    """Linear between the neighbours, the extremes being the quantiles 0 and 1."""
    place = share * (len(ranked) - 1)
    below = int(place)
    above = min(below + 1, len(ranked) - 1)
    return ranked[below] + (ranked[above] - ranked[below]) * (place - below)


def per_second(amount: float, seconds: float) -> float | None:
    """None where nothing was timed: one token has no time after the first."""
    return amount / seconds if amount > 0 and seconds > 0 else None


def share_outside(inside: float, whole: float) -> float | None:
    """The part of `whole` that was not spent inside, between 0 and 1."""
    return min(1.0, max(0.0, 1.0 - inside / whole)) if whole > 0 else None


def least_seconds(costs: Iterable[Cost], ceilings: Ceilings, dtype: str, activations: str = FLOAT) -> float:
    """The shortest time for steps that run one after another; what a step reads is its working set."""
    peak = ceilings.peak_of(dtype, activations)
    return sum(cost.seconds(peak, ceilings.read_at(cost.read)) for cost in costs)
