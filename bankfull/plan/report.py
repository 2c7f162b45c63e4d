"""A plan as rich tables, a chart and sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from bankfull.charts import Axis, Chart, Mark, Point, Series
from bankfull.limits.units import duration, scaled

if TYPE_CHECKING:
    from bankfull.plan.outcome import SimulatedOutcome
    from bankfull.plan.planner import DeploymentPlan
    from bankfull.plan.verify import PredictionCheck

HEADINGS = (
    "KL",
    "rows",
    "step tokens",
    "goodput/s",
    "of requests",
    "p99 TTFT",
    "limit",
    "p99 TPOT",
    "limit",
    "$/M out",
    "memory",
    "busy",
    "of limit",
)


def pareto_table(plan: DeploymentPlan) -> Table:
    title = f"{plan.request.model}: {plan.request.traffic}; {plan.request.objectives}"
    return _table(plan.pareto, title, plan.recommended)


def later_table(plan: DeploymentPlan) -> Table | None:
    """Configurations that this version cannot run, if any."""
    if not plan.later:
        return None
    return _table(plan.later, "not yet: predicted, but this version cannot run it", None, "why")


def _table(outcomes: Sequence[SimulatedOutcome], title: str, recommended: SimulatedOutcome | None, *more: str) -> Table:
    table = Table(title=Text(title))
    table.add_column("", no_wrap=True)
    table.add_column("devices", no_wrap=True)
    table.add_column("weights and KV cache", no_wrap=True)
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in more:
        table.add_column(heading)
    for outcome in outcomes:
        why = [Text(outcome.configuration.not_yet or "")] if more else []
        table.add_row("*" if outcome is recommended else "", *_cells(outcome), *why)
    return table


def _cells(outcome: SimulatedOutcome) -> Iterator[Text]:
    configuration = outcome.configuration
    cost = outcome.dollars_per_million
    route = f", {configuration.route}" if configuration.replicas > 1 else ""
    ways = "" if configuration.layout is None else f" as {configuration.layout.mesh}"
    ways += "" if configuration.separation is None else f", {configuration.separation}"
    for text in (
        f"{configuration.devices} x {configuration.site.name}{ways}{route}",
        configuration.prepared.name + (" (lossy)" if configuration.lossy else ""),
        str(configuration.prepared.loss),
        str(configuration.rows),
        str(configuration.step_tokens),
        f"{outcome.goodput:.3g}",
        f"{outcome.attainment:.0%}",
        _time(outcome.ttft_p99),
        _time(outcome.ttft_least),
        _time(outcome.tpot_p99),
        _time(outcome.tpot_least),
        "-" if cost is None else f"{cost:.3g}",
        scaled(outcome.memory, "B"),
        f"{outcome.busy:.0%}",
        f"{outcome.percent_of_limit:.0f}%",
    ):
        yield Text(text)


def _time(seconds: float) -> str:
    return "-" if seconds == float("inf") else duration(seconds)


def plan_chart(plan: DeploymentPlan) -> Chart:
    """The Pareto front: cost per million output tokens, or memory if a price is unknown, by latency."""
    priced = all(outcome.dollars_per_million is not None for outcome in plan.pareto)
    y = Axis("cost per million output tokens, $", log=True) if priced else Axis("memory", log=True, unit="B")
    by_device: dict[str, list[Point]] = {}
    marks = []
    for outcome in plan.pareto:
        configuration = outcome.configuration
        point = outcome.tpot_p99, outcome.dollars_per_million or 0.0 if priced else outcome.memory
        by_device.setdefault(f"{configuration.devices} x {configuration.site.name}", []).append(point)
        if outcome is plan.recommended:
            marks.append(Mark(*point, "recommended"))
    series = [Series(name, points, kind="points") for name, points in by_device.items()]
    title = f"{plan.request.model}: {plan.request.traffic}"
    return Chart(title, Axis("p99 time per output token", log=True, unit="s"), y, series, marks)


def sentences(plan: DeploymentPlan) -> Iterator[str]:
    """The text below the tables."""
    asked, best = plan.request, plan.recommended
    if best is None:
        yield "Nothing fits: no configuration that this version can run holds the model and its requests."
    else:
        yield _lead(plan, best)
        for command in best.configuration.commands(asked.model):
            yield f"  {command}"
        if best.configuration.replicas > 1:
            devices = best.configuration.devices
            yield f"  on a Ray cluster with {devices} devices of this kind: add --ray HOST:PORT (docs/cluster.md)"
        if best.lossy:
            yield "  It is lossy (quantized): check it with `bankfull quality` first." + _exact(plan)
        yield _latencies(best)
        yield _highest(plan)
        yield "What limits it:"
        yield from (f"  {line}" for line in plan.bottlenecks)
    if plan.skipped:
        yield "Skipped:"
        yield from (f"  {line}" for line in plan.skipped)
    if plan.notes:
        yield "Assumptions and caveats:"
        yield from (f"  {line}" for line in plan.notes)
    yield f"{plan.simulated} simulations with the engine's own scheduler; times by roofline."


AIMS = {
    "goodput": "has the highest goodput",
    "cost": "costs the least per output token",
    "latency": "has the lowest latency",
    "efficiency": "takes the least device time per output token",
}


def _lead(plan: DeploymentPlan, best: SimulatedOutcome) -> str:
    asked = plan.request
    if asked.objectives.stated:
        met = (
            ""
            if best.met
            else (
                f" No configuration meets the objectives for {asked.objectives.attainment:.0%} of the requests; "
                f"this one comes nearest, with {best.attainment:.0%}."
            )
        )
        return f"Recommended for {asked.goal} (* above):{met}"
    if best.met:
        which = f"of all that keep up with this traffic it {AIMS[asked.goal]}"
    else:
        which = (
            f"nothing keeps up with {asked.traffic.rate:.3g} requests/s; it serves {best.requests_per_s:.3g} of them "
            f"and {AIMS[asked.goal]}"
        )
    return f"Recommended without a bound on latency (* above; --slo sets one): {which}."


def _latencies(best: SimulatedOutcome) -> str:
    cost = "" if best.dollars_per_million is None else f", ${best.dollars_per_million:.3g} per million of them"
    return (
        f"TTFT is {_time(best.ttft_p50)} (p99 {_time(best.ttft_p99)}), TPOT {_time(best.tpot_p50)} (p99 "
        f"{_time(best.tpot_p99)}), end-to-end latency at most {_time(best.e2e_p99)} (p99); throughput is "
        f"{best.output_per_s:.3g} output tokens/s{cost}."
    )


def _highest(plan: DeploymentPlan) -> str:
    stated, rate = plan.request.objectives.stated, plan.highest_rate
    if rate is None:
        return "It meets the objectives at no rate." if stated else "It keeps up at no rate that was tried."
    return f"It {'meets the objectives' if stated else 'keeps up with'} up to about {rate:.3g} requests/s."


def _exact(plan: DeploymentPlan) -> str:
    exact = plan.lossless
    if exact is None:
        return ""
    chosen, cost = exact.configuration, exact.dollars_per_million
    price = "" if cost is None else f" at ${cost:.3g} per million tokens"
    return (
        f" The best lossless one, {chosen.devices} x {chosen.site.name}, gives {exact.goodput:.3g} requests/s{price}: "
        f"{chosen.commands(plan.request.model)[0]}"
    )


def verified_table(compared: Sequence[PredictionCheck]) -> Table:
    table = Table(title="predicted and measured on this machine")
    table.add_column("figure", no_wrap=True)
    for heading in ("predicted", "measured", "error", "limit"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in compared:
        table.add_row(
            one.figure,
            f"{one.predicted:.4g}",
            f"{one.measured:.4g}",
            "-" if one.error is None else f"{one.error:+.0%}",
            "-" if one.limit is None else f"{one.limit:.3g}",
        )
    return table
