"""Figures of a run: latency percentiles, throughput, goodput, and SLO attainment at tighter and wider objectives.

A failed request has no latency, but counts against goodput and attainment: it met no objective.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np

from bankfull.bench.load.client import Outcome
from bankfull.errors import ConfigError
from bankfull.traffic.slo import Slo

LATENCIES = ("ttft", "tpot", "itl", "e2e")
SCALES = tuple(round(10 ** (step / 20), 4) for step in range(-20, 21))
"""Factors on the objectives at which attainment is reported: from a tenth to ten times."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Statistics in seconds."""

    mean: float
    median: float
    std: float
    p90: float
    p95: float
    p99: float
    count: int

    def as_json(self) -> dict[str, float]:
        return asdict(self)


def distribution(values: Iterable[float]) -> Distribution | None:
    """None without values. Percentiles are interpolated linearly."""
    array = np.fromiter(values, np.float64)
    if not array.size:
        return None
    median, p90, p95, p99 = np.percentile(array, (50, 90, 95, 99)).tolist()
    return Distribution(float(array.mean()), median, float(array.std()), p90, p95, p99, array.size)


@dataclass(frozen=True)
class Measured:
    outcomes: Sequence[Outcome]
    slo: Slo

    def __post_init__(self) -> None:
        if not self.outcomes:
            raise ConfigError("No request was sent, so nothing was measured; ask for at least one.")

    @cached_property
    def good(self) -> list[Outcome]:
        """Requests that completed."""
        return [outcome for outcome in self.outcomes if outcome.error is None]

    @cached_property
    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.error is not None]

    @cached_property
    def duration(self) -> float:
        """Seconds until the last request ended."""
        return max(outcome.ended for outcome in self.outcomes)

    @cached_property
    def latencies(self) -> dict[str, Distribution | None]:
        """Distributions by name; ITL is over all gaps of all requests."""
        gaps = (gap for outcome in self.good for gap in outcome.gaps)
        distributions: dict[str, Distribution | None] = {}
        for name in LATENCIES:
            values = gaps if name == "itl" else (getattr(outcome, name) for outcome in self.good)
            distributions[name] = distribution(value for value in values if value is not None)
        return distributions

    @cached_property
    def late(self) -> Distribution | None:
        """Delay of sending: caused by the client itself, or by waiting for a connection."""
        return distribution(late for outcome in self.outcomes if (late := outcome.late) is not None)

    @property
    def input_tokens(self) -> int:
        return sum(outcome.input_tokens for outcome in self.good)

    @property
    def output_tokens(self) -> int:
        return sum(outcome.output_tokens for outcome in self.good)

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens found in the prefix cache; None if the server does not report them."""
        known = [outcome.cached_tokens for outcome in self.good if outcome.cached_tokens is not None]
        return sum(known) if known else None

    @property
    def request_rate(self) -> float:
        """Completed requests per second."""
        return len(self.good) / self.duration

    @property
    def goodput(self) -> float | None:
        """Requests per second that met every objective; None without objectives."""
        return None if not self.slo.stated else self.attained() * len(self.outcomes) / self.duration

    @cached_property
    def worst_ratios(self) -> np.ndarray:
        """Sorted ratios of each request's worst figure to its objective; infinite for a failed request."""
        ratios = [np.inf if one.error is not None else self.slo.worst_ratio(one.figures()) for one in self.outcomes]
        return np.sort(np.array(ratios))

    def attained(self, scale: float = 1.0) -> float:
        """SLO attainment: fraction of all requests that meet every objective times `scale`."""
        return float(np.searchsorted(self.worst_ratios, scale, side="right")) / len(self.outcomes)

    def attainment_curve(self) -> list[tuple[float, float]]:
        """(scale, attainment)."""
        return [(scale, self.attained(scale)) for scale in SCALES] if self.slo.stated else []

    @property
    def growth(self) -> float | None:
        """Mean latency of the last quarter of the requests over that of the first; None for a few requests."""
        ranked = sorted(self.good, key=lambda outcome: outcome.due)
        part = len(ranked) // 4
        if part < 5:
            return None
        first, last = (sum(outcome.e2e for outcome in some) for some in (ranked[:part], ranked[-part:]))
        return last / first if first > 0 else None

    def per_second(self) -> list[tuple[int, int, int]]:
        """(second, token events, requests in flight during it)."""
        seconds = int(self.duration) + 1
        events, open_ = np.zeros(seconds, int), np.zeros(seconds + 1, int)
        for outcome in self.outcomes:
            for time in outcome.times:
                events[int(time)] += 1
            open_[int(outcome.due)] += 1
            open_[int(outcome.ended) + 1] -= 1
        return list(zip(range(seconds), events.tolist(), np.cumsum(open_)[:-1].tolist(), strict=True))

    def peak_concurrency(self) -> int:
        """Peak number of requests in flight, from sending to completion."""
        marks = [(outcome.sent, 1) for outcome in self.outcomes if outcome.sent is not None]
        marks += [(outcome.ended, -1) for outcome in self.outcomes if outcome.sent is not None]
        most = now = 0
        for _, change in sorted(marks):  # at equal times, ends sort before starts
            now += change
            most = max(most, now)
        return most
