"""`plan`: the table for people, the object for programs, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from .conftest import Cli

TRAFFIC = ("--traffic", "rate=20/s, in=30, out=10", "--requests", 20)
HERE = (*TRAFFIC, "--devices", "cpu", "--no-calibrate", "--lossless")


def test_a_plan_shows_the_choices_the_command_and_what_limits_it(cli: Cli, model: Path) -> None:
    done = cli("plan", model, *HERE, "--slo", "ttft=2s, tpot=500ms")
    assert done.code == 0, done.err
    for shown in (
        "goodput/s",
        "p99 TTFT",
        "limit",
        "memory",
        "Recommended for goodput",
        f"bankfull serve {model} --device cpu",
        "What limits it",
        "assumed, not calibrated",
    ):
        assert shown in done.out, shown


def test_a_plan_as_json_is_one_object(cli: Cli, model: Path) -> None:
    done = cli("plan", model, *HERE, "--json")
    assert done.code == 0 and done.out.count("\n") == 1
    found = done.json
    assert found["recommended"]["configuration"]["device"] == "cpu" and found["recommended"]["met"]
    assert found["pareto"] and found["simulated"] >= 1 and "verified" not in found


def test_without_objectives_there_is_a_recommendation_and_its_latencies(cli: Cli, model: Path) -> None:
    done = cli("plan", model, *HERE)
    assert done.code == 0, done.err
    assert "Recommended without a bound on latency" in done.out and "TTFT is" in done.out
    assert "No configuration meets" not in done.out and f"bankfull serve {model} --device cpu" in done.out
    assert cli("plan", model, *HERE, "--json").json["goal"] == "efficiency"
    assert cli("plan", model, *HERE, "--price", "0.1", "--json").json["goal"] == "cost"
    assert cli("plan", model, *HERE, "--slo", "ttft=2s", "--json").json["goal"] == "goodput"


def test_a_configuration_is_enough_and_other_devices_are_looked_up(cli: Cli, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "hidden_size": 64,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "intermediate_size": 96,
                "num_hidden_layers": 2,
                "vocab_size": 160,
                "max_position_embeddings": 512,
                "rms_norm_eps": 1e-5,
                "torch_dtype": "bfloat16",
            }
        )
    )
    done = cli("plan", config, *TRAFFIC, "--devices", "l4", "--goal", "cost", "--lossless", "--json")
    assert done.code == 0, done.err
    assert done.json["recommended"]["dollars_per_million"] > 0
    assert any("no weights" in note for note in done.json["notes"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--traffic", "rate=5/s, in=10"), "lacks out="),
        ((*TRAFFIC, "--slo", "ttft=soon"), "not an objective"),
        ((*TRAFFIC, "--devices", "h1000"), "did you mean"),
        ((*TRAFFIC, "--goal", "joy"), "goal 'joy' is unknown"),
        ((*TRAFFIC, "--attainment", "110%"), "not a fraction of the requests"),
        ((*TRAFFIC, "--price", "-1"), "--price"),
        (("--traffic", "rate=5/s, in=1000, out=9"), "exceed the model's context"),
        ((*TRAFFIC, "--devices", "l4", "--verify", "--lossless"), "it is for l4"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(
    cli: Cli, model: Path, arguments: tuple[object, ...], said: str
) -> None:
    assert said in cli("plan", model, "--no-calibrate", *arguments).sentence


def test_traffic_is_needed(cli: Cli, model: Path) -> None:
    assert "--traffic" in cli("plan", model).sentence


DAY = ("--traffic", "rate=20/s, in=30, out=10", "--devices", "l4", "--no-calibrate", "--lossless", "--requests", 300)


def test_a_simulated_day_is_a_table_with_its_command(cli: Cli, model: Path) -> None:
    done = cli("plan", model, *DAY, "--simulate", "4", "--mtbf", 20, "--update", 12, "--slo", "ttft=2s, itl=1s")
    assert done.code == 0, done.err
    for shown in (
        "goodput/s",
        "hit rate",
        "$/M out",
        "replicas failed",
        "were updated",
        "--replicas 4 --routing prefix",
    ):
        assert shown in done.out, shown


def test_a_simulated_day_as_json_has_figures_and_curves(cli: Cli, model: Path) -> None:
    done = cli("plan", model, *DAY, "--simulate", "2..4", "--routing", "all", "--json")
    assert done.code == 0 and done.out.count("\n") == 1, done.err
    found = done.json["simulated"]
    assert {one["routing"] for one in found} == {"completion", "prefix", "least-loaded", "random-two", "round-robin"}
    for one in found:
        assert (one["requests"], one["lost"], one["replicas"]) == (300, 0, "2..4")
        assert 0 < one["goodput_per_s"] <= 20.5 and one["dollars_per_million"] > 0 and 0 <= one["hit_rate"] < 1
        assert len({len(curve) for curve in one["curves"].values()}) == 1


def test_the_gap_between_tokens_is_an_objective_of_a_simulated_day(cli: Cli, model: Path) -> None:
    shares = [
        cli("plan", model, *DAY, "--simulate", "2", "--slo", f"itl={limit}", "--json").json["simulated"][0][
            "attainment"
        ]
        for limit in ("1us", "10s")
    ]
    assert shares == [0.0, 1.0]


def test_a_recorded_day_is_simulated_and_drawn(cli: Cli, model: Path, tmp_path: Path) -> None:
    trace, picture = tmp_path / "day.csv", tmp_path / "day.png"
    rows = [f"{1e3 * at},{20 + at % 7},{1 + at % 5}" for at in range(40)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    done = cli("plan", model, *DAY, "--simulate", "3", "--trace", trace, "--chart", picture, "--json")
    assert done.code == 0, done.err
    assert (done.json["traffic"], done.json["simulated"][0]["ended"]) == ("day.csv", 40)
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")


def test_a_simulated_day_shows_its_progress_on_a_terminal(
    cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    done = cli("plan", model, *DAY, "--simulate", "2")
    assert done.code == 0 and "300/300" in done.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--simulate", "none"), "'none' is no number of replicas"),
        (("--simulate", "5..2"), "'5..2' is no number of replicas"),
        (("--simulate", "4", "--requests", 0), "--requests 0 is out of range"),
        (("--simulate", "4", "--routing", "prefixes"), "did you mean 'prefix'?"),
        (("--simulate", "4", "--mtbf", 0), "--mtbf 0 is out of range"),
        (("--simulate", "4", "--update", 24), "--update 24 is no hour of the day"),
        (("--simulate", "4", "--node-size", 0), "--node-size 0 is out of range"),
        (("--simulate", "4", "--start-seconds", "-1"), "--start-seconds -1 is out of range"),
        (("--simulate", "4", "--trace", "absent.jsonl"), "The trace absent.jsonl is no file"),
        (("--simulate", "4", "--chart", "day.gif"), "day.gif must end in .svg or .png"),
        (("--simulate", "4", "--verify"), "--verify runs one machine"),
    ],
)
def test_a_day_that_cannot_be_simulated_is_one_sentence(
    cli: Cli, model: Path, arguments: tuple[object, ...], said: str
) -> None:
    assert said in cli("plan", model, *DAY, *arguments).sentence


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "contains no request"),
        ("{not json}", "Line 1 of the trace"),
        ('{"timestamp": 0, "input_length": 9000, "output_length": 5}', "has a request of 9000 + 5 tokens"),
    ],
)
def test_a_trace_that_cannot_be_replayed_is_one_sentence(
    cli: Cli, model: Path, tmp_path: Path, text: str, said: str
) -> None:
    trace = tmp_path / "day.jsonl"
    trace.write_text(text)
    assert said in cli("plan", model, *DAY, "--simulate", "2", "--trace", trace).sentence


def test_a_plan_predicts_speculation_with_the_likely_times(cli: Cli, model: Path) -> None:
    asked = (*HERE, "--speculative", f"draft:{model}", "--acceptance", "1,1")
    done = cli("plan", model, *asked)
    assert done.code == 0, done.err
    assert "predicted gain" in done.out and "likely times" in done.out
    found = cli("plan", model, *asked, "--json").json["speculation"]
    one = found["batches"][0]
    # The drafter is the model itself: it cannot be worth its time, except for the step's fixed cost.
    assert one["tokens_per_step"] == 3 and one["draft_seconds"] < 2.1 * one["plain_seconds"]
    assert found["context"] == 35 and found["batches"][2]["batch"] == 64
    assert "speculation" not in cli("plan", model, *HERE, "--json").json
    refused = cli("plan", model, *HERE, "--speculative", "suffix", "--simulate", "10")
    assert refused.code == 2 and "predicts one replica" in refused.err


def test_a_plan_over_several_devices_names_its_layout(cli: Cli, model: Path) -> None:
    done = cli("plan", model, *TRAFFIC, "--devices", "l4", "--lossless", "--parallel", "pp=2", "--json")
    assert done.code == 0, done.err
    own = done.json["recommended"]["configuration"]
    assert own["parallel"] == "pp=2" and own["ways"] == 2 and "--parallel pp=2" in own["commands"][0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--parallel", "dp=2"), "no axis 'dp'"),
        (("--separate", "two"), "prefill=1,decode=2"),
        (("--link", "telegraph"), "no link 'telegraph'"),
        (("--simulate", "2", "--separate", "auto"), "leave out --separate"),
    ],
)
def test_a_layout_that_cannot_be_planned_is_refused(
    cli: Cli, model: Path, options: tuple[str, ...], words: str
) -> None:
    assert words in cli("plan", model, *TRAFFIC, "--devices", "l4", *options).sentence


def test_a_simulated_day_runs_with_the_layout_and_counts_its_devices(cli: Cli, model: Path) -> None:
    def day(*options: str) -> dict[str, Any]:
        asked = ("--devices", "l4", "--lossless", "--simulate", "2", *options, "--json")
        done = cli("plan", model, "--traffic", "rate=20/s, in=30, out=10", "--requests", 60, *asked)
        assert done.code == 0, done.err
        found: dict[str, Any] = done.json
        return found

    alone, joined = day(), day("--parallel", "pp=2")
    assert "--parallel pp=2" in joined["command"] and joined["configuration"]["ways"] == 2
    [one], [both] = alone["simulated"], joined["simulated"]
    assert both["dollars_per_million"] > 1.5 * one["dollars_per_million"]


def test_a_roofline_shows_a_layout_beside_one_device(cli: Cli, model: Path) -> None:
    asked = ("roofline", model, "--device", "l4", "--context", 64, "--prompt", 64, "--parallel", "pp=2")
    shown = cli(*asked)
    assert shown.code == 0 and "Each rank holds up to" in shown.out and "hidden states to the next stage" in shown.out
    found = cli(
        "roofline", model, "--device", "l4", "--context", 64, "--prompt", 64, "--parallel", "pp=2", "--json"
    ).json
    own = found["parallel"]
    assert own["ranks"] == 2 and len(own["weight_bytes_per_rank"]) == 2 and own["link"] == "pcie-4"
    assert all(step["likely"] >= step["least"] > 0 for step in own["steps"])
    large = cli("roofline", "llama-3.1-70b", "--device", "l4", "--parallel", "tp=2")
    assert "its memory of 24 GB is too small" in large.out
    assert "give --parallel" in cli("roofline", model, "--device", "l4", "--link", "pcie-5").sentence
    assert "knows no link" in cli("roofline", model, "--device", "m4", "--parallel", "pp=2").sentence
