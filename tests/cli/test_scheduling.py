"""Options of scheduling: alike in all commands, and one sentence for what cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bankfull import LLM
from bankfull.cli.scheduling import SchedulingOptions
from bankfull.config import SchedConfig
from bankfull.errors import ConfigError
from bankfull.plan.configurations import SCHEDULING, SERVED, scheduling_words
from bankfull.scheduling import POLICIES
from tests.tiny import speaking_folder

from .conftest import Cli

OPTIONS = [f"--{name.replace('_', '-')}" for name in SCHEDULING]
HERE = ("--traffic", "rate=20/s, in=30, out=10", "--requests", 20, "--devices", "cpu", "--no-calibrate", "--lossless")


@pytest.mark.parametrize(
    "command", ["serve", "run", "generate", "bench latency", "bench throughput", "plan", "explain"]
)
def test_every_command_that_runs_or_predicts_an_engine_has_the_options(cli: Cli, command: str) -> None:
    done = cli(*command.split(), "--help")
    assert done.code == 0
    missing = [option for option in OPTIONS if f"{option} " not in done.out]
    assert not missing


@pytest.mark.parametrize("policy", POLICIES)
def test_an_answer_does_not_depend_on_the_policy(cli: Cli, model: Path, policy: str) -> None:
    words = ("run", "-m", model, "--memory", "8MiB", "--max-tokens", 6, "--temperature", 0, "--seed", 1, "--no-limit")
    assert cli(*words, "--policy", policy, "Hello").out == cli(*words, "Hello").out


BAD = [
    (("--policy", "shortest"), "'shortest' is unknown"),
    (("--batching", "sometimes"), "'sometimes' is unknown"),
    (("--policy", "mlfq", "--quantum-ms", "0"), "quantum_ms=0.0"),
    (("--policy", "mlfq", "--quantum-ms", "inf"), "quantum_ms=inf"),
    (("--policy", "lpm", "--starvation", "-1"), "starvation=-1.0"),
    (("--batching", "static", "--batch-size", "0"), "batch_size=0"),
    (("--batching", "static", "--policy", "srpt"), "policy='srpt'"),
    (("--batching", "dynamic", "--batch-timeout", "-2"), "batch_timeout=-2.0"),
    (("--batching", "static", "--batch-timeout", "1"), "needs batching=dynamic"),
    (("--batch-size", "4"), "needs batching=static or dynamic"),
    (("--policy", "fcfs", "--quantum-ms", "5"), "needs policy=mlfq or skip-join-mlfq"),
    (("--policy", "fcfs", "--weights", "a=2"), "needs policy=fair"),
    (("--policy", "fair", "--weights", "a=0"), "'a=0'"),
    (("--policy", "fair", "--weights", "a"), "cannot be read at 'a'"),
    (("--policy", "fair", "--weights", "a=1,a=2"), "each key once"),
    (("--prefill-tokens", "0"), "--prefill-tokens 0"),
    (("--decode-rows", "-3"), "--decode-rows -3"),
]


@pytest.mark.parametrize(("words", "says"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_a_value_that_cannot_be_is_refused_in_one_sentence(
    cli: Cli, model: Path, words: tuple[str, ...], says: str
) -> None:
    for command in (("run", "-m", model, "Hello"), ("serve", model), ("plan", model, *HERE)):
        assert says in cli(*command, *words).sentence, command


def test_a_batch_larger_than_the_rows_is_refused(cli: Cli, model: Path) -> None:
    words = ("run", "-m", model, "--memory", "8MiB", "--rows", 2, "--batching", "static", "--batch-size", 3)
    assert "batch_size=3 is more than the 2 rows" in cli(*words, "Hello").sentence


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({}, {"policy": "priority"}),
        ({"policy": "lpm", "starvation": 1.0}, {"policy": "lpm", "starvation": 1.0}),
        ({"batching": "static"}, {"batching": "static"}),
        ({"policy": "fair", "weights": "a=2, b=0.5"}, {"policy": "fair", "weights": {"a": 2.0, "b": 0.5}}),
    ],
)
def test_a_service_runs_the_given_policy_and_priority_else(words: dict[str, Any], expected: dict[str, Any]) -> None:
    assert SchedulingOptions(**words).served() == expected


def test_a_planned_command_starts_the_scheduling_that_was_simulated(cli: Cli, model: Path) -> None:
    done = cli("plan", model, *HERE, "--policy", "skip-join-mlfq", "--quantum-ms", "20", "--decode-rows", "4")
    assert done.code == 0, done.err
    assert "--policy skip-join-mlfq --decode-rows 4 --quantum-ms 20" in done.out
    assert scheduling_words(SERVED) == []
    assert scheduling_words(SchedConfig(batching="dynamic")) == ["--batching", "dynamic"]


@pytest.mark.parametrize("words", [("--batching", "static", "--batch-size", 4), ("--batching", "dynamic")])
def test_batches_are_planned_to_the_last_incomplete_one(cli: Cli, model: Path, words: tuple[Any, ...]) -> None:
    done = cli("plan", model, *HERE, *words, "--json")
    assert done.code == 0, done.err
    assert done.json["recommended"]["met"] in (True, False) and done.json["recommended"]["attainment"] > 0


def test_weights_of_keys_are_a_dict_in_python() -> None:
    llm = LLM(str(speaking_folder()), memory="1MiB", policy="fair", weights={"alice": 3, "bob": 0.5})
    assert llm.loaded.frontend.engine.scheduler.config.weights == (("alice", 3), ("bob", 0.5))
    for bad in ("alice=3", {"alice": 0}, {"alice": "many"}, 7, [("alice",)]):
        with pytest.raises(ConfigError, match="weight"):
            LLM(str(speaking_folder()), policy="fair", weights=bad)
