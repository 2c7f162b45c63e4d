"""Arrival processes: start times in seconds from the beginning, all drawn before the first request is sent."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from bankfull.errors import ConfigError

MOST_ARRIVALS = 1_000_000


@dataclass(frozen=True, slots=True)
class Arrivals:
    """`rate`: mean requests per second; infinity: all at once."""

    rate: float
    kind: str = "poisson"
    burstiness: float = 1.0
    """Shape of the gamma distribution of gaps: below 1 is bursty, 1 is Poisson, far above 1 is nearly regular."""

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ConfigError(f"rate={self.rate} must be above 0 requests per second (inf: all at once).")
        if self.kind not in GAPS:
            raise ConfigError(f"The arrival process {self.kind!r} is unknown; use one of {', '.join(GAPS)}.")
        if not 0 < self.burstiness < float("inf"):
            raise ConfigError(f"burstiness={self.burstiness} must be a number above 0.")
        if self.burstiness != 1.0 and self.kind != "gamma":
            raise ConfigError(f"burstiness={self.burstiness} has no effect on {self.kind} arrivals; use gamma.")

    def offsets(self, count: int, seed: int) -> list[float]:
        """Reproducible for a seed; the first request also comes after a gap."""
        check_count(count)
        if self.rate == float("inf"):
            return [0.0] * count
        gap, draw, now = GAPS[self.kind], random.Random(f"arrivals/{seed}"), 0.0
        offsets = []
        for _ in range(count):
            now += gap(draw, self.rate, self.burstiness)
            offsets.append(now)
        return offsets


def check_count(count: int) -> None:
    if not 1 <= count <= MOST_ARRIVALS:
        raise ConfigError(f"{count} requests are out of range; use 1 to {MOST_ARRIVALS}.")


GAPS: dict[str, Callable[[random.Random, float, float], float]] = {
    "poisson": lambda draw, rate, _: draw.expovariate(rate),
    # A gamma distribution of shape b and scale 1/(rate b) has mean 1/rate and 1/b of an exponential's variance.
    "gamma": lambda draw, rate, shape: draw.gammavariate(shape, 1 / (rate * shape)),
    "constant": lambda draw, rate, _: 1 / rate,
}
