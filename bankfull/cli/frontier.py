"""`bankfull quality --frontier`: many ways to run one model, each with its cost and its loss."""

from __future__ import annotations

import json as json_text
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bankfull.bench.frontier.measure import WayFigures


def frontier(
    model: str,
    texts: Sequence[str],
    *,
    device_name: str,
    ways: str | None,
    window: int | None,
    reps: int,
    cost: str,
    chart: str | None,
    json: bool,
) -> None:
    from bankfull.bench.frontier.measure import judge_of, measure
    from bankfull.bench.frontier.report import check_cost, frontier_chart, frontier_table, pareto
    from bankfull.bench.frontier.ways import default_ways, parse_ways
    from bankfull.charts import check_path, print_chart, save
    from bankfull.cli.terminal import print_table, progress, say
    from bankfull.errors import ConfigError, ModelError
    from bankfull.quality.windows import WINDOW
    from bankfull.runtime.device import open_device
    from bankfull.weights.locate import locate
    from bankfull.weights.source import open_model

    check_cost(cost)
    if cost != "bytes" and not reps:
        raise ConfigError(f"--cost {cost} needs measured speeds; give --reps of at least 1.")
    if chart is not None:
        check_path(chart)
    device = open_device(device_name)
    left_out: list[str] = []
    if ways is None:
        chosen, left_out = default_ways(open_model(locate(model)), device)
    else:
        chosen = parse_ways(ways, device.kind)
    with progress("reference", None) as advance:
        judge = judge_of(model, texts, device, window or WINDOW, lambda done: advance(done, "tokens"))
    figures: list[WayFigures] = []
    with progress("ways", len(chosen)) as advance:
        for one in measure(judge, chosen, device, reps=reps, advance=advance):
            if isinstance(one, tuple):
                left_out.append(f"{one[0].name}: {one[1]}")
            else:
                figures.append(one)
    if not figures:
        raise ModelError(f"No way to run {model} could be measured; the first reason: {left_out[0]}")
    if chart is not None:
        save(frontier_chart(model, figures, cost), chart)
    if json:
        facts = {
            "model": model,
            "device": device.kind,
            "window": judge.window,
            "tokens": figures[0].quality.tokens,
            "reference": {"perplexity": figures[0].quality.reference_perplexity, "recall": judge.recall},
            "ways": [one.as_json() for one in figures],
            "pareto": {
                each: [one.way.name for one in pareto(figures, each)] for each in ("bytes", "decode", "prefill")
            },
            "left_out": left_out,
        }
        print(json_text.dumps(facts))
        return
    print_table(frontier_table(model, figures))
    recall = "" if judge.recall is None else f", recall {judge.recall:.1%}"
    print(f"The float32 reference has perplexity {figures[0].quality.reference_perplexity:.3f}{recall}.")
    if sys.stdout.isatty() and chart is None:
        print_chart(frontier_chart(model, figures, cost))
    for line in left_out:
        say(f"bankfull: left out: {line}")
