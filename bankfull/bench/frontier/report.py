"""The frontier as a table and a chart: cost against loss, with the ways that no other beats in both."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table
from rich.text import Text

from bankfull.bench.frontier.measure import WayFigures
from bankfull.charts import Axis, Chart, Mark, Series
from bankfull.errors import ConfigError
from bankfull.limits.units import scaled

LEAST_KL = 1e-7
"""A smaller divergence is drawn here: a logarithmic axis has no zero."""
COSTS: dict[str, tuple[Axis, Callable[[WayFigures], float | None]]] = {
    "bytes": (Axis("weights", unit="B"), lambda one: float(one.weight_bytes)),
    "decode": (Axis("time per output token", unit="s"), lambda one: _inverse(one.decode_per_s)),
    "prefill": (Axis("time per prompt token", unit="s"), lambda one: _inverse(one.prefill_per_s)),
}
"""What a way costs: the axis of the chart, and the figure."""


def _inverse(rate: float | None) -> float | None:
    return None if rate is None else 1 / rate


def check_cost(cost: str) -> None:
    if cost not in COSTS:
        raise ConfigError(f"--cost {cost[:40]!r} is unknown; use {', '.join(COSTS)}.")


def pareto(found: Sequence[WayFigures], cost: str) -> list[WayFigures]:
    """Ways that no other beats: none costs at most as much and loses at most as much, and less of one. By cost."""
    of = COSTS[cost][1]
    known = [(value, one.quality.kl_mean, one) for one in found if (value := of(one)) is not None]
    kept = [
        (value, number, one)
        for number, (value, loss, one) in enumerate(known)
        if not any(other <= value and less <= loss and (other, less) != (value, loss) for other, less, _ in known)
    ]
    return [one for _, _, one in sorted(kept, key=lambda each: each[:2])]


def frontier_table(model: str, found: Sequence[WayFigures]) -> Table:
    table = Table(title=Text(f"{model}: cost and loss; best: no other way is both cheaper and closer"))
    table.add_column("way", no_wrap=True)
    headings = "bits/weight", "bytes", "KL mean", "KL p99", "perplexity", "recall", "decode/s", "prefill/s", "best"
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "best" else "right", no_wrap=True)
    best = {cost: {id(one) for one in pareto(found, cost)} for cost in COSTS}
    for one in found:
        cells = (
            f"{one.bits_per_weight:.2f}",
            scaled(one.weight_bytes, "B"),
            f"{one.quality.kl_mean:.3g}",
            f"{one.quality.kl_p99:.3g}",
            f"{one.quality.perplexity:.3f}",
            "-" if one.recall is None else f"{one.recall:.1%}",
            "-" if one.decode_per_s is None else f"{one.decode_per_s:.1f}",
            "-" if one.prefill_per_s is None else f"{one.prefill_per_s:.0f}",
            ", ".join(cost for cost in COSTS if id(one) in best[cost]),
        )
        table.add_row(Text(one.way.name), *cells)
    return table


def frontier_chart(model: str, found: Sequence[WayFigures], cost: str) -> Chart:
    axis, of = COSTS[cost]

    def places(ways: Sequence[WayFigures]) -> list[tuple[float, float]]:
        return [(value, max(one.quality.kl_mean, LEAST_KL)) for one in ways if (value := of(one)) is not None]

    best = pareto(found, cost)
    chosen = {id(one) for one in best}
    others = [one for one in found if id(one) not in chosen]
    series = [Series("not beaten in both", places(best))]
    series += [Series("beaten", places(others), kind="points")] if others else []
    shown = [one for one in found if of(one) is not None]
    marks = [
        Mark(*place, one.way.name, int(id(one) not in chosen)) for one, place in zip(shown, places(shown), strict=True)
    ]
    return Chart(f"{model}: cost against loss", axis, Axis("KL to float32, mean nats", log=True), series, marks)
