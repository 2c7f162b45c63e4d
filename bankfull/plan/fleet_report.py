"""A simulated day as a table, JSON and charts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from rich.table import Table
from rich.text import Text

from bankfull.charts import Axis, Chart, Mark, Point, Series
from bankfull.limits.units import duration
from bankfull.plan.fleet_ledger import FleetLedger, Floats
from bankfull.traffic.slo import Slo

BINS = 96
"""Points of the curves over a day: quarters of an hour."""
CHART_WIDTH, CHART_HEIGHT = 860, 260


@dataclass(slots=True)
class FleetOutcome:
    """What one day has shown with one routing policy."""

    routing: str
    replicas: str
    ledger: FleetLedger
    slo: Slo
    price: float | None
    """Dollars per replica and hour."""

    @property
    def met(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Whether each request that ended met all objectives."""
        met = np.ones(self.ledger.ended, bool)
        for name, limit in self.slo.stated.items():
            met &= self.seconds(name) <= limit
        return met

    def seconds(self, name: str) -> Floats:
        """A latency of each request that ended: "ttft", "tpot", "itl" (the longest gap between two tokens) or "e2e". A
        single token has neither TPOT nor ITL: both are 0."""
        of = self.ledger.column
        if name == "ttft":
            return of("first") - of("arrived")
        if name == "tpot":
            return (of("last") - of("first")) / np.maximum(1, of("output") - 1)
        return of("gap") if name == "itl" else of("last") - of("arrived")

    @property
    def goodput(self) -> float:
        """Requests of the day per second that met the objectives."""
        today = self.ledger.column("arrived") <= self.ledger.seconds
        return float((self.met & today).sum()) / self.ledger.seconds

    @property
    def attainment(self) -> float:
        """Fraction of all requests, with those that were refused or lost."""
        ledger = self.ledger
        return float(self.met.sum()) / max(1, ledger.ended + ledger.refused + ledger.lost)

    @property
    def hit_rate(self) -> float:
        """Cached fraction of all prompt tokens."""
        return float(self.ledger.column("cached").sum()) / max(1.0, float(self.ledger.column("prompt").sum()))

    @property
    def output_tokens(self) -> float:
        return float(self.ledger.column("output").sum())

    @property
    def replica_hours(self) -> float:
        """Hours that replicas were paid for during the day, all together."""
        return float(self.ledger.paid_seconds(np.array([0.0, self.ledger.seconds]))[0]) / 3600

    @property
    def dollars_per_million(self) -> float | None:
        """Per million output tokens of requests that ended during the day."""
        if self.price is None:
            return None
        tokens = float(self.ledger.column("output")[self.ledger.column("last") <= self.ledger.seconds].sum())
        return 1e6 * self.price * self.replica_hours / max(1.0, tokens)

    def late(self, name: str, share: float) -> float:
        """A quantile of a latency, in seconds."""
        times = self.seconds(name)
        return float(np.quantile(times, share)) if len(times) else float("inf")

    def curves(self) -> dict[str, list[float | None]]:
        """Figures by quarter of an hour. A request counts where it arrived, tokens and costs where they arose."""
        ledger = self.ledger
        edges = np.linspace(0, ledger.seconds, BINS + 1)
        width = ledger.seconds / BINS
        arrived, output = ledger.column("arrived"), ledger.column("output")
        good = _sums(arrived, edges, self.met.astype(np.float64))
        prompts, hits = (_sums(arrived, edges, ledger.column(name)) for name in ("prompt", "cached"))
        tokens = _sums(ledger.column("last"), edges, output)
        curves: dict[str, Floats] = {
            "hour": (edges[:-1] + edges[1:]) / 2 / ledger.seconds * 24,
            "arrivals_per_s": (_sums(arrived, edges, np.ones(len(arrived))) + _sums(ledger.refusals(), edges)) / width,
            "goodput_per_s": good / width,
            "hit_rate": np.divide(hits, prompts, out=np.full(BINS, np.nan), where=prompts > 0),
            "replicas_ready": ledger.ready_replicas(edges),
        }
        if self.price is not None:
            paid = ledger.paid_seconds(edges) / 3600 * self.price
            cost = np.divide(1e6 * paid, tokens, out=np.full(BINS, np.nan), where=tokens > 0)
            curves["dollars_per_million"] = cost
        return {name: [None if np.isnan(x) else float(x) for x in values] for name, values in curves.items()}

    def as_json(self) -> dict[str, Any]:
        ledger = self.ledger
        return {
            "routing": self.routing,
            "replicas": self.replicas,
            "requests": ledger.ended + ledger.refused + ledger.lost,
            "ended": ledger.ended,
            "refused": ledger.refused,
            "lost": ledger.lost,
            "resumed": ledger.resumed,
            "recomputed_tokens": ledger.recomputed,
            "failed_replicas": ledger.failed,
            "updated_replicas": ledger.updated,
            "day_seconds": ledger.seconds,
            "goodput_per_s": self.goodput,
            "attainment": self.attainment,
            "hit_rate": self.hit_rate,
            "output_tokens": self.output_tokens,
            "replica_hours": self.replica_hours,
            "dollars_per_million": self.dollars_per_million,
            "ttft_p50": self.late("ttft", 0.5),
            "ttft_p99": self.late("ttft", 0.99),
            "tpot_p50": self.late("tpot", 0.5),
            "tpot_p99": self.late("tpot", 0.99),
            "itl_p99": self.late("itl", 0.99),
            "e2e_p99": self.late("e2e", 0.99),
            "curves": self.curves(),
            "failure_hours": [24 * time / ledger.seconds for time in ledger.failures],
            "update_hours": [24 * time / ledger.seconds for time in ledger.updates],
        }


def _sums(times: Floats, edges: Floats, weights: Floats | None = None) -> Floats:
    sums, _ = np.histogram(times, edges, weights=weights)
    return sums.astype(np.float64)


def fleet_table(outcomes: Sequence[FleetOutcome], title: str) -> Table:
    table = Table(title=Text(title))
    table.add_column("routing", no_wrap=True)
    for heading in (
        "goodput/s",
        "of requests",
        "hit rate",
        "p50 TTFT",
        "p99 TTFT",
        "p99 TPOT",
        "$/M out",
        "replica hours",
        "refused",
        "lost",
        "resumed",
        "recomputed",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in outcomes:
        cost = one.dollars_per_million
        table.add_row(
            one.routing,
            f"{one.goodput:.3g}",
            f"{one.attainment:.1%}",
            f"{one.hit_rate:.1%}",
            duration(one.late("ttft", 0.5)),
            duration(one.late("ttft", 0.99)),
            duration(one.late("tpot", 0.99)),
            "-" if cost is None else f"{cost:.3g}",
            f"{one.replica_hours:.4g}",
            str(one.ledger.refused),
            str(one.ledger.lost),
            str(one.ledger.resumed),
            str(one.ledger.recomputed),
        )
    return table


def fleet_charts(outcomes: Sequence[FleetOutcome], title: str) -> list[Chart]:
    """Goodput, cost, hit rate and replicas over the day, one below the other."""
    first = outcomes[0]
    hours = Axis("hour of the day", low=0, high=24)
    charts = []
    for name, label, unit, scale in (
        ("goodput_per_s", "goodput, requests/s", "", 1.0),
        ("dollars_per_million", "$ per million output tokens", "", 1.0),
        ("hit_rate", "prefix cache hit rate", "%", 100.0),
        ("replicas_ready", "replicas ready", "", 1.0),
    ):
        series = []
        for one in outcomes:
            curves = one.curves()
            points = [
                (x, scale * y)
                for x, y in zip(curves["hour"], curves.get(name, []), strict=False)
                if x is not None and y is not None
            ]
            if points:
                series.append(Series(one.routing, points))
        if not series:
            continue
        if name == "goodput_per_s":
            curves = first.curves()
            points = [(x or 0.0, y or 0.0) for x, y in zip(curves["hour"], curves["arrivals_per_s"], strict=True)]
            series.append(Series("arrivals", points, dashed=True))
        marks = []
        if name == "replicas_ready":
            if failures := _on_curve(first, first.ledger.failures):
                series.append(Series("failures", failures, kind="points"))
            ends = zip(_on_curve(first, first.ledger.updates), ("update begins", "update ends"), strict=False)
            marks = [Mark(*point, text) for point, text in ends]
        charts.append(Chart(f"{title}: {label}", hours, Axis(label, low=0, unit=unit), series, marks))
    return charts


def _on_curve(one: FleetOutcome, times: Sequence[float]) -> list[Point]:
    """Points on the curve of ready replicas."""
    ready = one.curves()["replicas_ready"]
    hours = [24 * time / one.ledger.seconds for time in times if time < one.ledger.seconds]
    return [(hour, ready[int(hour / 24 * BINS)] or 0.0) for hour in hours]


def stacked_svg(charts: Sequence[Chart], theme: Literal["auto", "light", "dark"] = "auto") -> str:
    """Charts one below the other, in one <svg> element."""
    parts, top = [], 0
    for chart in charts:
        drawn = chart.svg(CHART_WIDTH, CHART_HEIGHT, theme)
        parts.append(drawn.replace("<svg ", f'<svg y="{top}" ', 1))
        match = re.search(r'height="(\d+)"', drawn)
        assert match is not None, "every chart has a height"
        top += int(match[1])
    size = f'width="{CHART_WIDTH}" height="{top}" viewBox="0 0 {CHART_WIDTH} {top}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{"".join(parts)}</svg>\n'
