"""Statistics of measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from bankfull.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Spread:
    """Repetitions of one figure: median, quartiles (`lower`, `upper`) and extremes (`low`, `high`)."""

    median: float
    low: float
    lower: float
    upper: float
    high: float
    count: int


def spread(values: Sequence[float]) -> Spread:
    if not values:
        raise ConfigError("No repetition measured this figure, so it cannot be summarized; run at least one.")
    ranked = sorted(values)
    return Spread(median(ranked), ranked[0], quantile(ranked, 0.25), quantile(ranked, 0.75), ranked[-1], len(ranked))


def quantile(ranked: Sequence[float], share: float) -> float:
    """Linear interpolation between neighbours; the extremes are the quantiles 0 and 1."""
    place = share * (len(ranked) - 1)
    below = int(place)
    above = min(below + 1, len(ranked) - 1)
    return ranked[below] + (ranked[above] - ranked[below]) * (place - below)


def per_second(amount: float, seconds: float) -> float | None:
    """None if nothing was timed: a single token has no time after the first."""
    return amount / seconds if amount > 0 and seconds > 0 else None


def share_outside(inside: float, whole: float) -> float | None:
    """Fraction of `whole` not spent in `inside`, clamped to 0..1."""
    return min(1.0, max(0.0, 1.0 - inside / whole)) if whole > 0 else None
