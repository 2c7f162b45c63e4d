"""`plan`: the table for people, the object for programs, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

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
        "Not yet in this version",
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
