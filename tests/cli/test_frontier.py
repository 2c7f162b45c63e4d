"""`quality --frontier`: every way gets its cost and its loss, the best are marked, and bad ways get one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import Cli

TEXT = "The river runs at the full capacity of its channel, and the engine fills it.\n" * 2
WAYS = "saved; bf16; int8; int4:32; int3; int4:32 kv:int8"


@pytest.fixture
def options(tmp_path: Path) -> tuple[object, ...]:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return "--text", path, "--window", 200, "--frontier"


def test_a_frontier_orders_ways_by_cost_and_loss(
    cli: Cli, model: Path, tmp_path: Path, options: tuple[object, ...]
) -> None:
    chart = tmp_path / "chart.svg"
    found = cli("quality", model, *options, "--ways", WAYS, "--reps", 1, "--chart", chart, "--json").json
    ways = {one["name"]: one for one in found["ways"]}
    assert list(ways) == WAYS.split("; ") and found["left_out"] == []
    bits = [ways[name]["bits_per_weight"] for name in ("saved", "int8", "int4:32", "int3")]
    assert bits == sorted(bits, reverse=True) and bits[0] == 32 and ways["bf16"]["bits_per_weight"] == 16
    losses = [ways[name]["kl_mean"] for name in ("saved", "int8", "int4:32", "int3")]
    assert losses == sorted(losses) and losses[0] < 1e-6 and losses[3] > 1e-3
    assert all(one["decode_per_s"] > 0 and one["prefill_per_s"] > 0 for one in ways.values())
    assert all(0 <= one["recall"] <= 1 for one in ways.values()) and found["reference"]["perplexity"] > 1
    # The tables of this model weigh more than its layers, and only bf16 makes them smaller.
    assert set(found["pareto"]["bytes"]) == {"saved", "bf16"} and found["pareto"]["decode"]
    drawn = chart.read_text()
    assert "<svg" in drawn and "int4:32" in drawn and "not beaten" in drawn
    assert ways["int4:32 kv:int8"]["kv_dtype"] == "int8"


def test_a_saved_model_is_a_way_and_one_that_cannot_run_is_named(
    cli: Cli, model: Path, tmp_path: Path, options: tuple[object, ...]
) -> None:
    done = cli("quality", model, *options, "--ways", f"{model}; {tmp_path}/none; q4_k", "--reps", 0)
    assert done.code == 0, done.err
    (line,) = [line for line in done.out.splitlines() if line.strip().startswith(str(model))][-1:]
    assert " 32.00 " in line and "bytes" in line and "float32 reference has perplexity" in done.out
    assert f"left out: {tmp_path}/none" in done.err and "left out: q4_k" in done.err and "columns" in done.err


def test_the_default_ways_leave_out_what_does_not_apply(cli: Cli, model: Path, options: tuple[object, ...]) -> None:
    found = cli("quality", model, *options, "--reps", 0, "--json").json
    names = {one["name"] for one in found["ways"]}
    assert names >= {"saved", "bf16", "int8", "int4:32", "int3"} and "q4_k,keep" not in names
    assert any(line.startswith("q4_k,keep: its blocks") for line in found["left_out"])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--ways", "int5"), "'int5'"),
        (("--ways", " ; "), "names 0 ways"),
        (("--ways", "int8; int8"), "twice"),
        (("--ways", "int8 int4"), "two types"),
        (("--ways", "kv:int1"), "kv_dtype"),
        (("--cost", "joy"), "--cost 'joy'"),
        (("--cost", "decode", "--reps", 0), "--reps"),
        (("--chart", "x.gif"), ".svg or .png"),
        (("--quantize", "int8"), "--ways"),
        (("--ways", "q4_k"), "No way to run"),
    ],
)
def test_bad_ways_get_one_sentence(
    cli: Cli, model: Path, options: tuple[object, ...], more: tuple[object, ...], said: str
) -> None:
    assert said in cli("quality", model, *options, *more).sentence


def test_options_of_the_frontier_need_it(cli: Cli, model: Path) -> None:
    assert "--frontier" in cli("quality", model, "--ways", "int8").sentence
