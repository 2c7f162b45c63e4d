"""`bankfull bench speculative`: tables and charts of speculative decoding beside plain decoding."""

from __future__ import annotations

import json as json_text
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bankfull.cli.options import EngineOptions
from bankfull.speculation import SpeculativeChoice

if TYPE_CHECKING:
    from rich.table import Table

    from bankfull.bench.speculative import SetReport
    from bankfull.charts import Chart

USUAL = ("suffix", "ngram", "auto")
SHOWN_POSITIONS = 4
"""Draft positions of the table."""


def measure(
    engine: EngineOptions,
    ways: Sequence[str] | None,
    sets: Sequence[str] | None,
    output_len: int,
    concurrency: int,
    reps: int,
    seed: int,
    temperature: float,
    chart: Path | None,
    json: bool,
) -> None:
    from bankfull.bench.prompt_sets import SETS, prompt_set
    from bankfull.charts import check_path, save

    ways, sets = list(ways or USUAL), list(sets or SETS)
    for way in ways:
        SpeculativeChoice.parse(way)
    for name in sets:
        prompt_set(name)
    if chart is not None:
        check_path(chart)
    plain = replace(engine, speculative="off").load(chats=True)

    from bankfull.bench.speculative import SpeculativeBench
    from bankfull.cli.terminal import print_table, progress
    from bankfull.limits.meter.step_limit import step_limit_of
    from bankfull.sample.params import SamplingParams

    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=output_len, detokenize=False)
    limit = step_limit_of(plain, measure=True)
    bench = SpeculativeBench(plain, concurrency=concurrency, reps=reps, params=params, limit=limit)
    reports: list[SetReport] = []
    done = 0
    with progress("passes", 2 * reps * len(ways) * len(sets)) as advance:
        for way in ways:
            llm = replace(engine, speculative=way).load(chats=True)
            for name in sets:

                def count(note: str = f"{way} on {name}") -> None:
                    nonlocal done
                    done += 1
                    advance(done, note)

                reports.append(bench.run(way, llm, name, count))
            del llm
    if chart is not None:
        save(gain_chart(reports), chart)
    if json:
        load = {"model": engine.model, "concurrency": concurrency, "temperature": temperature, "reps": reps}
        print(json_text.dumps({**load, "output_len": output_len, "sets": [one.as_json() for one in reports]}))
        return
    kind = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    print_table(table_of(reports, f"speculative decoding of {engine.model}: {concurrency} at a time, {kind}"))
    print("accepted: drafts at positions 1, 2, ... among those verified there. of limit: least time of the same steps.")


def table_of(reports: Sequence[SetReport], title: str) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title))
    for heading in ("with", "prompts"):
        table.add_column(heading, no_wrap=True)
    headings = (
        "tokens",
        "looped",
        "plain/s",
        "with/s",
        "gain",
        "per step",
        "accepted",
        "drafting",
        "of limit",
        "differs",
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    for one in reports:
        shown = [f"{100 * share:.0f}" for share in one.acceptance[:SHOWN_POSITIONS] if share is not None]
        table.add_row(
            Text(one.name),
            one.prompts,
            str(one.tokens),
            f"{100 * one.looped:.0f}%",
            f"{one.plain_rate:.1f}",
            f"{one.rate:.1f}",
            f"{one.gain:.2f}x",
            f"{one.tokens_per_step:.2f}",
            " ".join(shown) + "%" if shown else "-",
            "-" if one.drafting_share is None else f"{100 * one.drafting_share:.1f}%",
            "-" if one.of_limit is None else f"{100 * one.of_limit:.0f}%",
            f"{100 * one.differing:.1f}%",
        )
    return table


def gain_chart(reports: Sequence[SetReport]) -> Chart:
    """Bars of the gains, one group for each prompt set."""
    from bankfull.charts import Axis, Chart, Series

    sets = list(dict.fromkeys(one.prompts for one in reports))
    ways = list(dict.fromkeys(one.name for one in reports))
    series = [
        Series(way, [(sets.index(one.prompts), one.gain) for one in reports if one.name == way], kind="bars")
        for way in ways
    ]
    return Chart(
        "Gain of speculative decoding: tokens per second, relative to plain decoding",
        Axis("prompt set", names=sets),
        Axis("gain", low=0),
        series,
    )
