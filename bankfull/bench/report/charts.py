"""Charts of a load test."""

from __future__ import annotations

from collections.abc import Sequence

from bankfull.bench.load.measures import Measured
from bankfull.bench.report.report import LoadReport
from bankfull.charts import Axis, Chart, Mark, Series

MOST_POINTS = 400
"""Points of a series; more are indistinguishable and enlarge the file."""


def charts_of(report: LoadReport) -> list[Chart]:
    """The charts for which there is data."""
    m = report.measured
    charts = [latency_chart(report)] if m.good else []
    if m.slo.stated:
        charts.append(attainment_chart(m))
    if m.duration >= 2:
        charts.append(timeline_chart(m))
    if m.good:
        charts.append(arrival_chart(m))
    return charts


def latency_chart(report: LoadReport) -> Chart:
    """Cumulative distributions of the latencies."""
    m = report.measured
    series = []
    for name, title in (("ttft", "TTFT"), ("tpot", "TPOT"), ("e2e", "E2E")):
        values = sorted(v for outcome in m.good if (v := outcome.figures()[name]) is not None and v > 0)
        if values:
            shares = [(value, 100 * (rank + 1) / len(values)) for rank, value in enumerate(values)]
            series.append(Series(title, thinned(shares)))
            if (least := report.least.get(name)) is not None:
                series.append(Series(f"least {title}", [(least, 0.0), (least, 100.0)], dashed=True))
    return Chart(
        "Latency distributions: fraction of the requests at or below",
        Axis("time", log=True, unit="s"),
        Axis("requests", low=0, high=100, unit="%"),
        series,
    )


def attainment_chart(m: Measured) -> Chart:
    """SLO attainment at tighter and wider objectives."""
    curve = [(scale, 100 * part) for scale, part in m.attainment_curve()]
    return Chart(
        f"SLO attainment of {m.slo}, by factor on the objectives",
        Axis("factor on the objectives", log=True),
        Axis("requests that meet all objectives", low=0, high=100, unit="%"),
        [Series("attainment", curve)],
        [Mark(1.0, 100 * m.attained(), f"{100 * m.attained():.3g}%")],
    )


def timeline_chart(m: Measured) -> Chart:
    rows = m.per_second()
    return Chart(
        "The run over time",
        Axis("time", unit="s"),
        Axis("per second", low=0),
        [
            Series("events with tokens", thinned([(second, events) for second, events, _ in rows]), kind="area"),
            Series("requests in flight", thinned([(second, open_) for second, _, open_ in rows])),
        ],
    )


def arrival_chart(m: Measured) -> Chart:
    """Latency by arrival time, which shows growing queues."""
    clouds = {
        "TTFT": [(o.due, o.ttft) for o in m.good if o.ttft is not None and o.ttft > 0],
        "E2E": [(o.due, o.e2e) for o in m.good if o.e2e > 0],
    }
    series = [Series(name, thinned(points), kind="points") for name, points in clouds.items() if points]
    return Chart("Latency by arrival time", Axis("due", unit="s"), Axis("latency", log=True, unit="s"), series)


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most MOST_POINTS of the points, evenly spaced, including the last."""
    if len(points) <= MOST_POINTS:
        return [(float(x), float(y)) for x, y in points]
    step = (len(points) - 1) / (MOST_POINTS - 1)
    return [(float(points[round(n * step)][0]), float(points[round(n * step)][1])) for n in range(MOST_POINTS)]
