"""`bench policies` and `bench tradeoff`: tables for people, objects for programs, and what is refused."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import save

from .conftest import Cli

FEW = ("--jobs", 30, "--shortest", 4, "--longest", 60)
TINY = ("--jobs", 8, "--shortest", 3, "--longest", 20, "--prompt-len", "40-50", "--rows", 2, "--memory", "8MiB")


def test_all_policies_are_shown_with_every_figure_and_drawn(cli: Cli, tmp_path: Path) -> None:
    chart = tmp_path / "policies.svg"
    done = cli("bench", "policies", *FEW, "--chart", chart)
    assert done.code == 0, done.err
    for shown in ("skip-join-mlfq", "orca", "static", "dynamic", "JCT", "TTFT", "TPOT", "blocked", "good/s", "swapped"):
        assert shown in done.out, shown
    assert "skip-join-mlfq" in chart.read_text()


def test_chosen_policies_as_json_are_one_object(cli: Cli) -> None:
    words = ("bench", "policies", *FEW, "--with", "srpt", "--with", "fcfs", "--rows", 2, "--seed", 4, "--json")
    found = cli(*words).json
    assert [one["policy"] for one in found["simulated"]] == ["srpt", "fcfs"] and "measured" not in found
    assert found["simulated"][0]["jct_mean"] <= found["simulated"][1]["jct_mean"]
    assert found == cli(*words).json, "a seed gives one result"


def test_a_simulated_host_tier_holds_what_the_device_cannot(cli: Cli) -> None:
    words = ("bench", "policies", *FEW, "--with", "mlfq", "--json", "--memory-tokens", 900, "--rows", 4, "--load", 2)
    assert cli(*words).json["simulated"][0]["swapped_bytes"] == 0
    assert cli(*words, "--host-tokens", 20000).json["simulated"][0]["swapped_bytes"] > 0


def test_the_model_runs_the_same_jobs_and_both_are_compared(cli: Cli, model: Path) -> None:
    done = cli("bench", "policies", "-m", model, "--engine", *TINY, "--with", "fcfs", "--with", "mlfq", "--json")
    assert done.code == 0, done.err
    found = done.json
    for kind in ("measured", "simulated", "replayed"):
        assert [one["policy"] for one in found[kind]] == ["fcfs", "mlfq"] == list(found["slowdowns"])
    assert found["same_order"] in (True, False) and found["largest_error"] >= 0 and found["step_model"]["step"] > 0


def test_an_engine_with_fewer_rows_than_a_batch_compares_smaller_batches(cli: Cli, model: Path, tmp_path: Path) -> None:
    """Memory for the recurrent state of a few sequences lowers the rows."""
    recurrent = save("mamba2", tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, recurrent / name)
    words = (*TINY[:-4], "--rows", 8, "--memory", "32KiB", "--with", "fcfs", "--with", "static", "--json")
    done = cli("bench", "policies", "-m", recurrent, "--engine", *words)
    assert done.code == 0, done.err
    assert done.json["rows"] < 8 and len(done.json["measured"]) == 2


def test_the_budgets_trade_first_tokens_for_later_ones(cli: Cli, tmp_path: Path) -> None:
    chart = tmp_path / "tradeoff.svg"
    words = ("bench", "tradeoff", "--jobs", 60, "--rows", 8, "--prefill-tokens", "32,512", "--decode-rows", "2,8")
    done = cli(*words, "--chart", chart)
    assert done.code == 0 and "TTFT" in done.out and chart.exists(), done.err
    points = {(one["decode_rows"], one["prefill_tokens"]): one for one in cli(*words, "--json").json["points"]}
    assert points[8, 32]["ttft"] > points[8, 512]["ttft"] and points[2, 512]["tpot"] > points[8, 512]["tpot"]


def test_replicas_are_placed_by_completion_beside_other_ways(cli: Cli) -> None:
    words = ("bench", "policies", "--jobs", 60, "--longest", 100, "--rows", 2, "--replicas", 3, "--json")
    found = cli(*words).json
    assert found["replicas"] == 3
    named = [one["policy"] for one in found["simulated"]]
    assert named == [f"skip-join-mlfq, {routing}" for routing in ("completion", "least-loaded", "random-two")]
    assert "--replicas runs" in cli(*words[:-1], "--with", "static").sentence


def test_a_policy_that_cannot_serve_the_load_is_called_overloaded(cli: Cli) -> None:
    """Static batches serve fewer jobs than fcfs: their times would grow with the number of jobs."""
    words = ("bench", "policies", "--jobs", 150, "--with", "fcfs", "--with", "static")
    done, found = cli(*words), cli(*words, "--json").json
    row = next(line for line in done.out.splitlines() if line.split()[:1] == ["static"])
    assert "overloaded" in row and "static is overloaded: it serves" in done.out and "grows without bound" in done.out
    assert [one["overloaded"] for one in found["simulated"]] == [False, True]
    low = cli(*words, "--load", 0.1, "--json").json
    assert [one["overloaded"] for one in low["simulated"]] == [False, False] and low["notes"] == []


def test_the_table_says_why_orca_equals_fcfs_and_when_it_does_not(cli: Cli) -> None:
    words = ("bench", "policies", "--jobs", 150, "--with", "fcfs", "--with", "orca", "--json")
    same = cli(*words).json
    first, orca = same["simulated"]
    assert {**orca, "policy": "fcfs"} == first and "orca equals fcfs here" in same["notes"][0]
    tokens = re.search(r"--memory-tokens (\d+) shows", same["notes"][0])
    assert tokens is not None
    other = cli(*words, "--memory-tokens", tokens[1]).json
    first, orca = other["simulated"]
    assert orca["jct_mean"] != first["jct_mean"] and other["notes"] == []


BAD: list[tuple[tuple[Any, ...], str]] = [
    (("policies", "--with", "magic"), "'magic' is unknown"),
    (("policies", "--policy", "srpt"), "leave out --policy"),
    (("policies", "--quantum-ms", "0"), "quantum_ms=0.0"),
    (("policies", "--load", "0"), "--load 0.0"),
    (("policies", "--jobs", "0"), "0 requests are out of range"),
    (("policies", "--stretch", "0.5"), "--stretch 0.5"),
    (("policies", "--prompt-len", "many"), "'many'"),
    (("policies", "--prompt-len", "4-9"), "cannot share"),
    (("policies", "--step-times", "step=8"), "'step=8'"),
    (("policies", "--step-times", "step=0ms"), "no time of a step"),
    (("policies", "--quantize", "int8"), "--quantize describes the model, which only --engine runs"),
    (("policies", "--kv-host", "1GiB"), "--kv-host describes the model"),
    (("policies", "--threads", "2"), "--threads describes the model"),
    (("policies", "--speculative", "ngram"), "--speculative describes the model"),
    (("policies", "-m", "other"), "--model describes the model"),
    (("policies", "--token-bytes", "9"), "give --host-tokens"),
    (("policies", "--engine", "--step-times", "step=8ms"), "leave out the simulator's options"),
    (("policies", "--shortest", "9", "--longest", "3"), "Outputs of 9 to 3"),
    (("policies", "--chart", "policies.gif"), ".gif"),
    (("tradeoff", "--policy", "magic"), "'magic' is unknown"),
    (("tradeoff", "--prefill-tokens", "64,0"), "'64,0'"),
    (("tradeoff", "--decode-rows", "x"), "'x'"),
]


@pytest.mark.parametrize(("words", "says"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_what_cannot_be_is_refused_in_one_sentence(cli: Cli, words: tuple[Any, ...], says: str) -> None:
    assert says in cli("bench", *words).sentence
