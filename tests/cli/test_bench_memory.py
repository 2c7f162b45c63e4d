"""`bankfull bench memory`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Cli


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--memory-tokens", "100"), "give more memory"),
        (("--traffic", "rate=1/s, in=4000, out=10"), "give a longer --max-model-len"),
        (("--traffic", "rate=1/s"), "lacks in="),
        (("--page-tokens", "0"), "must be at least 1"),
        (("--step-time", "0", "--token-time", "0"), "must be above 0"),
        (("--requests", "0"), "must be at least 1"),
        (("--trace", "none.jsonl"), "cannot be read"),
        (("--trace", "none.jsonl", "--traffic", "rate=1/s, in=4, out=10"), "exclude each other"),
        (("--chart", "chart.pdf"), "must end in .svg or .png"),
    ],
    ids=str,
)
def test_bad_options_end_with_one_sentence(cli: Cli, options: tuple[str, ...], reason: str) -> None:
    assert reason in cli("bench", "memory", *options).sentence


def test_the_command_prints_a_table_draws_a_chart_and_gives_json(cli: Cli, tmp_path: Path) -> None:
    trace, chart = tmp_path / "trace.jsonl", tmp_path / "memory.svg"
    lines = [{"timestamp": 10 * i, "input_length": 50 + i, "output_length": 40} for i in range(60)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    sizes = ("--memory-tokens", "1024", "--max-model-len", "256", "--trace", str(trace))
    shown = cli("bench", "memory", *sizes, "--chart", str(chart))
    assert shown.code == 0 and "contiguous, maximum length" in shown.out and "recorded in trace.jsonl" in shown.out
    assert "<svg" in chart.read_text()
    told = json.loads(cli("bench", "memory", *sizes, "--json").out)
    assert told["requests"] == 60 and [one["output_tokens"] for one in told["allocators"]] == [2400] * 3
