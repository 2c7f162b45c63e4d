"""The report of a load test: figures, warnings, and their JSON form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from bankfull.bench.load.client import Outcome
from bankfull.bench.load.energy import Energy
from bankfull.bench.load.measures import Measured
from bankfull.bench.load.stalls import Stall, sums, worst_at
from bankfull.bench.load.utilization import Utilization

MILLION = 1e6
LATE_SECONDS = 1e-3
"""Send delay above which a request measures the client as much as the server."""
DISTURBED = 0.01
"""Fraction of requests disturbed by the client's own stalls above which a warning is printed."""

GROWTH = 2.0
"""Ratio of the mean latency in the last quarter of a run to the first above which the queue is likely unstable."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Server, model, workload and date of a run."""

    url: str
    model: str
    api: str
    workload: str
    arrivals: str
    rate: float
    """Requests per second; infinite: all at once."""
    burstiness: float
    requests: int
    seed: int
    max_concurrency: int | None
    date: str
    """Formatted as 20260131-142355."""
    backend: str = "openai"
    label: str = ""


@dataclass(frozen=True, slots=True)
class Price:
    """Price of the server's machine per hour."""

    per_hour: float
    source: str

    def per_million(self, tokens: int, seconds: float) -> float | None:
        return self.per_hour / 3600 * seconds / tokens * MILLION if tokens else None


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of a report: a value with its unit, and its share of the limit if known."""

    name: str
    value: float | None
    unit: str = ""
    percent: float | None = None
    """Percent of the limit."""
    note: str = ""


@dataclass(frozen=True)
class LoadReport:
    setting: Setting
    measured: Measured
    utilization: Utilization | None = None
    """Utilization, if the server is bankfull and reports its counters."""
    least: Mapping[str, float] = field(default_factory=dict)
    """Latency name -> mean of the shortest times of each request alone."""
    energy: Energy | None = None
    price: Price | None = None
    stalls: Sequence[Stall] = ()
    """Stalls of the client."""

    def percent(self, latency: str) -> float | None:
        """Shortest latency in percent of the mean."""
        distribution, least = self.measured.latencies[latency], self.least.get(latency)
        return (
            None if distribution is None or least is None or not distribution.mean else 100 * least / distribution.mean
        )

    def rates(self) -> Iterator[Figure]:
        m, utilization = self.measured, self.utilization
        near = None if utilization is None else utilization.percent_of_rate
        yield Figure("completed", len(m.good), "requests")
        yield Figure("failed", len(m.failed), "requests", note=self.failures())
        yield Figure("job completion time", m.duration, "s")
        yield Figure("requests/s", m.request_rate, note=f"{m.request_rate * 60:.4g} per minute")
        if m.slo.stated:
            yield Figure("goodput", m.goodput, "requests/s", note=f"objectives: {m.slo}")
            yield Figure("attainment", 100 * m.attained(), "%", note="of all requests meet every objective")
        yield Figure("input tokens/s", m.input_tokens / m.duration, note=self._cached())
        yield Figure("output tokens/s", m.output_tokens / m.duration, percent=near)
        yield Figure("all tokens/s", (m.input_tokens + m.output_tokens) / m.duration, percent=near)
        yield Figure("peak concurrency", m.peak_concurrency(), "requests")

    def machine(self) -> Iterator[Figure]:
        """Utilization, client stalls, energy and cost, as far as known."""
        m, utilization = self.measured, self.utilization
        if utilization is not None:
            yield Figure("engine busy", 100 * utilization.busy, "%", note="of the time, inside steps")
            yield Figure("steps, % of limit", utilization.percent_of_limit, "%", note="shortest time over theirs")
            for kind, named in (("decode", "decoding"), ("prompt", "with prompts")):
                mbu, mfu = utilization.mbu(kind), utilization.mfu(kind)
                if mbu is not None:
                    yield Figure(f"MBU, steps {named}", 100 * mbu, "%", note="of the memory bandwidth")
                if mfu is not None:
                    yield Figure(f"MFU, steps {named}", 100 * mfu, "%", note="of the arithmetic peak")
        if self.stalls:
            by_machine, by_itself = sums(self.stalls)
            for stalled, why in ((by_machine, "other programs ran"), (by_itself, "the client was busy")):
                yield Figure(
                    "client stalled",
                    1e3 * stalled.seconds,
                    "ms",
                    note=f"{why}: {stalled.times} times, {1e3 * stalled.longest:.3g} ms at most",
                )
        if self.energy is not None:
            yield Figure("energy", self.energy.total, "J", note=", ".join(self.energy.joules))
            yield Figure("power", self.energy.watts, "W")
            yield Figure("energy per output token", self.energy.per_token(m.output_tokens), "J")
        if self.price is not None:
            source = f"at {self.price.per_hour:g} per hour, {self.price.source}"
            whole = m.input_tokens + m.output_tokens
            yield Figure(
                "cost per million output tokens", self.price.per_million(m.output_tokens, m.duration), "$", note=source
            )
            yield Figure("cost per million tokens", self.price.per_million(whole, m.duration), "$", note=source)

    def failures(self, most: int = 3) -> str:
        """Reasons of failures, most frequent first."""
        reasons = Counter(outcome.error for outcome in self.measured.failed).most_common(most)
        return "; ".join(f"{count}x {reason}" for reason, count in reasons)

    def warnings(self) -> list[str]:
        """Conditions that make the figures less reliable."""
        late, warnings = self.measured.late, []
        if late is not None and late.p99 > LATE_SECONDS:
            warnings.append(
                f"1% of the requests were sent {late.p99 * 1e3:.3g} ms late or later: {self._why_late()}; "
                "the delay counts as latency"
            )
        if self.disturbed > DISTURBED * len(self.measured.outcomes):
            longest = max(stall.seconds for stall in self.stalls)
            warnings.append(
                f"{self.disturbed} requests were sent, or their first or last token was read, during or just after "
                f"a stall of the client of more than 1 ms ({longest * 1e3:.3g} ms at most), which is part of their "
                "figures"
            )
        if (growth := self.measured.growth) is not None and growth > GROWTH and self.setting.rate != float("inf"):
            warnings.append(
                f"the last quarter of the requests took {growth:.3g} times as long as the first: the server does not "
                "keep up, and latencies grow with the length of the run"
            )
        if self.measured.failed:
            warnings.append(f"{len(self.measured.failed)} requests failed: {self.failures()}")
        return warnings

    @cached_property
    def disturbed(self) -> int:
        """Requests whose figures include a millisecond or more of the client's own stalls."""
        long = [stall for stall in self.stalls if stall.seconds > LATE_SECONDS]
        moments = map(_by_the_clients_clock, self.measured.outcomes)
        return sum(any(worst_at(long, moment) is not None for moment in some) for some in moments)

    def _why_late(self) -> str:
        if self.setting.max_concurrency is not None:
            return "they waited for the concurrency limit"
        by_machine, by_itself = sums(self.stalls)
        if by_itself.seconds > by_machine.seconds:
            return "the client needed more than one core"
        return "this machine was too busy to send them in time"

    @property
    def offered(self) -> float:
        """Offered load in requests per second, up to the last arrival."""
        last = max(outcome.due for outcome in self.measured.outcomes)
        return len(self.measured.outcomes) / last if last > 0 else float("inf")

    def _cached(self) -> str:
        cached = self.measured.cached_tokens
        if cached is None or not self.measured.input_tokens:
            return ""
        return f"{100 * cached / self.measured.input_tokens:.3g}% of them were in the prefix cache"

    def as_json(self) -> dict[str, Any]:
        """Fields without a vLLM name."""
        m = self.measured
        return {
            "workload": self.setting.workload,
            "arrivals": self.setting.arrivals,
            "seed": self.setting.seed,
            "url": self.setting.url,
            "slo": {name: 1e3 * value for name, value in m.slo.stated.items()},
            "attainment": m.attained() if m.slo.stated else None,
            "attainment_curve": m.attainment_curve(),
            "requests_per_minute": m.request_rate * 60,
            "input_throughput": m.input_tokens / m.duration,
            "cached_input_tokens": m.cached_tokens,
            "offered_rate": None if self.offered == float("inf") else self.offered,
            "sent_late_s": None if m.late is None else asdict(m.late),
            "kernel_stamped_requests": sum(outcome.stamped for outcome in m.outcomes),
            "client_stalls": dict(zip(("by_machine", "by_itself"), map(asdict, sums(self.stalls)), strict=True))
            | {"disturbed_requests": self.disturbed},
            "least_ms": {name: 1e3 * value for name, value in self.least.items()},
            "percent_of_limit": {name: self.percent(name) for name in self.least},
            "reached": None if self.utilization is None else self.utilization.as_json(),
            "energy": None
            if self.energy is None
            else {
                "joules": self.energy.joules,
                "watts": self.energy.watts,
                "joules_per_output_token": self.energy.per_token(m.output_tokens),
            },
            "cost": None
            if self.price is None
            else {
                "price_per_hour": self.price.per_hour,
                "source": self.price.source,
                "per_million_output_tokens": self.price.per_million(m.output_tokens, m.duration),
                "per_million_tokens": self.price.per_million(m.input_tokens + m.output_tokens, m.duration),
            },
            "warnings": self.warnings(),
        }


def _by_the_clients_clock(one: Outcome) -> Iterator[float]:
    """The times in a request's figures that come from the client's clock."""
    yield one.due if one.sent is None else one.sent
    if one.times and (not one.stamped or one.times[:1] == one.times[1:2]):
        yield one.times[0]  # packets may have merged, so that the first token has the second's timestamp
    if not one.stamped:
        yield one.ended
