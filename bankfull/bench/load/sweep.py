"""The highest sustainable rate: the required fraction of the requests meets every objective.

Rates double until one fails; then the interval between the highest passing and the lowest failing rate is bisected on a
logarithmic scale until it is narrow enough. A single pass may be luck, so the result must pass several further trials
with other arrivals and prompts. If it fails one, the search continues below it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bankfull.errors import ConfigError

LOWEST_PART = 1 / 64
"""Lowest rate of the search, as a fraction of the first rate."""


Trial = Callable[[float, int], float]
"""(rate, trial number) -> SLO attainment. Trial numbers never repeat."""


@dataclass(frozen=True, slots=True)
class Tried:
    rate: float
    attained: float
    passed: bool
    confirming: bool


@dataclass(frozen=True, slots=True)
class Found:
    rate: float | None
    """Highest rate that passed every trial; None: even the lowest failed."""
    failed: float | None
    """Lowest rate that failed; None: no rate failed."""
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
        """(rate, mean attainment of its trials)."""
        by_rate: dict[float, list[float]] = {}
        for trial in self.tried:
            by_rate.setdefault(trial.rate, []).append(trial.attained)
        return [(rate, sum(parts) / len(parts)) for rate, parts in sorted(by_rate.items())]


@dataclass(frozen=True, slots=True)
class Search:
    first: float = 1.0
    """First rate in requests per second."""
    highest: float = 1000.0
    target: float = 0.9
    """Required SLO attainment."""
    precision: float = 0.05
    """Relative distance between the result and a failing rate, at most."""
    confirmations: int = 2
    """Further trials that the result must pass."""

    def __post_init__(self) -> None:
        if not 0 < self.first <= self.highest < math.inf:
            raise ConfigError(
                f"A search from {self.first:g} to {self.highest:g} requests/s is empty; the first rate must be above 0 "
                "and at most the highest."
            )
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
            # The earlier pass was luck: continue from a lower rate that passed, if any.
            high = low
            low = self._below(high, tried, passes)
        return Found(None, high, tuple(tried))

    def _bracket(self, passes: Callable[[float], bool]) -> tuple[float | None, float | None]:
        """A passing and a failing rate a factor of two apart."""
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
