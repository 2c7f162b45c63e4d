"""The highest rate that a server sustains: as much of the requests as is asked for meets every objective.

Rates double until one fails; then the gap between the highest that passed and the lowest that failed is halved, on a
logarithmic scale, until it is narrow enough. A rate that passed once may have been lucky: the answer is one that passed
again and again, with other arrivals and prompts each time. If it fails then, the search goes on below it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bankfull.errors import ConfigError

LOWEST_PART = 1 / 64
"""Of the first rate: below it nothing is looked for."""


Trial = Callable[[float, int], float]
"""(rate, number of the trial) -> the part of the requests that met every objective. Numbers never repeat."""


@dataclass(frozen=True, slots=True)
class Tried:
    rate: float
    attained: float
    passed: bool
    confirming: bool


@dataclass(frozen=True, slots=True)
class Found:
    rate: float | None
    """The highest that passed every time; None: not even the lowest did."""
    failed: float | None
    """The lowest rate that failed; None: none did."""
    tried: tuple[Tried, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "highest_rate": self.rate,
            "lowest_failed_rate": self.failed,
            "trials": [
                {"rate": t.rate, "attainment": t.attained, "passed": t.passed, "confirming": t.confirming}
                for t in self.tried
            ],
        }

    def curve(self) -> list[tuple[float, float]]:
        """(rate, mean attainment of the trials at it)."""
        by_rate: dict[float, list[float]] = {}
        for trial in self.tried:
            by_rate.setdefault(trial.rate, []).append(trial.attained)
        return [(rate, sum(parts) / len(parts)) for rate, parts in sorted(by_rate.items())]


@dataclass(frozen=True, slots=True)
class Search:
    first: float = 1.0
    """Requests per second to begin with."""
    highest: float = 1000.0
    target: float = 0.9
    """The part of the requests that must meet every objective."""
    precision: float = 0.05
    """How far apart, relatively, the answer and a rate that fails may be."""
    confirmations: int = 2
    """Further passes that the answer needs."""

    def __post_init__(self) -> None:
        if not 0 < self.first <= self.highest < math.inf:
            raise ConfigError(f"A search from {self.first:g} to {self.highest:g} requests/s is none.")
        if not 0 < self.target <= 1 or not 0.001 <= self.precision <= 1 or not 0 <= self.confirmations <= 100:
            raise ConfigError(
                f"target={self.target} must lie in (0, 1], precision={self.precision} between 0.001 and 1, "
                f"confirmations={self.confirmations} between 0 and 100."
            )

    def run(self, trial: Trial) -> Found:
        tried: list[Tried] = []

        def passes(rate: float, confirming: bool = False) -> bool:
            attained = trial(rate, len(tried))
            tried.append(Tried(rate, attained, attained >= self.target, confirming))
            return tried[-1].passed

        low, high = self._bracket(passes)
        while low is not None:
            while high is not None and high / low > 1 + self.precision:
                middle = math.sqrt(low * high)
                low, high = (middle, high) if passes(middle) else (low, middle)
            if all(passes(low, confirming=True) for _ in range(self.confirmations)):
                return Found(low, high, tuple(tried))
            # It was lucky before: what passed below it, if anything did, is where to go on.
            high = low
            low = self._below(high, tried, passes)
        return Found(None, high, tuple(tried))

    def _bracket(self, passes: Callable[[float], bool]) -> tuple[float | None, float | None]:
        """A rate that passes and one that fails, by factors of two."""
        rate = self.first
        if passes(rate):
            while rate < self.highest:
                further = min(2 * rate, self.highest)
                if not passes(further):
                    return rate, further
                rate = further
            return rate, None
        while rate / 2 >= self.first * LOWEST_PART:
            rate /= 2
            if passes(rate):
                return rate, 2 * rate
        return None, rate

    def _below(self, high: float, tried: list[Tried], passes: Callable[[float], bool]) -> float | None:
        failed = {trial.rate for trial in tried if not trial.passed}
        passed = [trial.rate for trial in tried if trial.passed and trial.rate < high and trial.rate not in failed]
        if passed:
            return max(passed)
        rate = high / 2
        while rate >= self.first * LOWEST_PART:
            if passes(rate):
                return rate
            rate /= 2
        return None
