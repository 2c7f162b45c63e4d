"""`bankfull bench memory`: tables and charts of ways to allocate the memory of sequences."""

from __future__ import annotations

import json as json_text
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from bankfull.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from bankfull.charts import Chart
    from bankfull.plan.memory import MemoryOutcome, MemoryRequest, MemoryWorld

USUAL = "rate=20/s, in=20-1000, out=10-1000"


def measure(
    world: MemoryWorld,
    traffic: str | None,
    trace: Path | None,
    requests: int,
    seed: int,
    chart: Path | None,
    json: bool,
) -> None:
    from bankfull.charts import check_path, save
    from bankfull.cli.terminal import print_table
    from bankfull.plan.memory import compare

    if traffic is not None and trace is not None:
        raise ConfigError("--traffic and --trace exclude each other; give one of the two.")
    if requests < 1:
        raise ConfigError(f"--requests {requests} must be at least 1.")
    if chart is not None:
        check_path(chart)
    asked, described = recorded(trace, requests) if trace is not None else generated(traffic or USUAL, requests, seed)
    outcomes = compare(world, asked)
    if chart is not None:
        save(memory_chart(outcomes), chart)
    if json:
        facts = {"traffic": described, "requests": len(asked), "world": asdict(world)}
        print(json_text.dumps({**facts, "allocators": [outcome.as_json() for outcome in outcomes]}))
        return
    print_table(memory_table(outcomes, f"{len(asked)} requests, {described}, in memory for {world.capacity} tokens"))
    print(
        "Shares of the memory while requests waited for it. reserved: filled later; in vain: never filled (internal "
        "waste); in pieces: free and enough for the next request, if it were one piece (external waste)."
    )
    print(
        f"The time of a step is assumed: {1e3 * world.step_seconds:g} ms, and {1e6 * world.token_seconds:g} us per "
        "token."
    )


def generated(traffic: str, requests: int, seed: int) -> tuple[list[MemoryRequest], str]:
    from bankfull.plan.memory import MemoryRequest
    from bankfull.plan.traffic import parse_traffic

    spec = parse_traffic(traffic)
    trace = spec.trace(requests, 2, seed)
    return [MemoryRequest(one.time, len(one.prompt), one.output) for one in trace], str(spec)


def recorded(path: Path, requests: int) -> tuple[list[MemoryRequest], str]:
    from bankfull.bench.load.workloads import recorded_lengths
    from bankfull.plan.memory import MemoryRequest

    return [MemoryRequest(*one) for one in recorded_lengths(path, requests)], f"recorded in {path.name}"


def memory_table(outcomes: Sequence[MemoryOutcome], title: str) -> Table:
    from rich.table import Table

    table = Table(title=title)
    table.add_column("memory")
    names = ("used", "reserved", "in vain", "in pieces", "free")
    for name in (*names, "sequences", "most", "preempted", "tokens/s", "mean s"):
        table.add_column(name, justify="right")
    for outcome in outcomes:
        table.add_row(
            outcome.allocator,
            *(f"{100 * part:.1f}%" if outcome.waited else "-" for part in outcome.parts),
            f"{outcome.sequences:.1f}" if outcome.waited else "-",
            str(outcome.most_sequences),
            str(outcome.preemptions),
            f"{outcome.tokens_per_second:.0f}",
            f"{outcome.completion:.2f}",
        )
    return table


def memory_chart(outcomes: Sequence[MemoryOutcome]) -> Chart:
    from bankfull.charts import Axis, Chart, Series
    from bankfull.plan.memory import PARTS

    series = [
        Series(outcome.allocator, [(i, 100 * part) for i, part in enumerate(outcome.parts)], "bars")
        for outcome in outcomes
    ]
    names = ("used", "reserved for later", "never used", "free in pieces", "free")
    assert len(names) == len(PARTS)
    return Chart(
        "Memory while requests wait for it", Axis("", names=names), Axis("share of the memory", unit="%"), series
    )
