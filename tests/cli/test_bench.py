"""`bench`: the table for people, the object for programs, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from bankfull.limits.machine.ceilings import Ceilings
from bankfull.ops import native

from .conftest import Cli

SMALL = ("--prompt-len", 12, "--output-len", 4, "--reps", 2, "--memory", "8MiB")


def test_latency_shows_every_figure_and_what_it_was_compared_with(cli: Cli, model: Path) -> None:
    done = cli("bench", "latency", "-m", model, *SMALL)
    assert done.code == 0, done.err
    for figure in (
        "time to first token",
        "prefill tokens/s",
        "prefill percent of limit",
        "decode tokens/s",
        "decode host share",
        "decode bytes",
        "decode flop",
        "decode percent of limit",
        "quartiles",
        "lowest .. highest",
    ):
        assert figure in done.out, figure
    assert "the better of a measurement before and one after" in done.out and "call sites fall back" in done.out


def test_latency_as_json_has_every_repetition_and_a_summary_of_them(cli: Cli, model: Path, ceilings: Ceilings) -> None:
    done = cli("bench", "latency", "-m", model, *SMALL, "--seed", 3, "--json")
    assert done.code == 0 and done.out.count("\n") == 1
    found = done.json
    assert found["kind"] == "latency" and found["device"] == "cpu" and found["model"] == str(model)
    assert found["load"] == {
        "prompt_len": 12,
        "output_len": 4,
        "requests": 1,
        "reps": 2,
        "seed": 3,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
    }
    assert found["ceilings"]["used"]["read_bytes_per_s"] == ceilings.read_bytes_per_s
    assert len(found["repetitions"]) == 2 and set(found["summary"]) == set(found["repetitions"][0])
    for row in found["repetitions"]:
        assert row["prefill_tokens_per_s"] == pytest.approx(12 / row["time_to_first_token_s"])
        assert row["decode_tokens_per_s"] == pytest.approx(3 / row["decode_seconds"])
        assert 0 <= row["decode_host_share"] <= 1 and row["decode_percent_of_limit"] > 0
    rates = [row["decode_tokens_per_s"] for row in found["repetitions"]]
    spread = found["summary"]["decode_tokens_per_s"]
    assert (spread["low"], spread["high"], spread["count"]) == (min(rates), max(rates), 2)
    assert spread["median"] == pytest.approx(sum(rates) / 2)
    assert found["operations"]["paged_attention"]


def test_sampled_decoding_is_measured_and_the_title_says_so(cli: Cli, model: Path) -> None:
    done = cli("bench", "latency", "-m", model, *SMALL, "--temperature", 0.8, "--top-k", 40, "--top-p", 0.9)
    assert done.code == 0, done.err
    assert "temperature 0.8, top_k 40, top_p 0.9" in " ".join(done.out.split())


@pytest.mark.skipif(native.status() is not None, reason="the kernels are not built")
def test_a_profile_is_shown_for_both_phases_and_is_in_the_object(cli: Cli, model: Path) -> None:
    done = cli("bench", "latency", "-m", model, *SMALL, "--profile")
    assert done.code == 0, done.err
    for shown in ("prefill, 1 step of", "decode, 3 steps of", "least ms", "attention", "head", "host", "0 breaks"):
        assert shown in done.out, shown
    found = cli("bench", "throughput", "-m", model, *SMALL, "--concurrency", 2, "--profile", "--json").json
    assert set(found["profile"]) == {"prefill", "decode"} and found["tape"]["breaks"] == {}
    assert {row["kernel"] for row in found["profile"]["decode"]} >= {"attention", "head", "host", "step"}
    assert cli("bench", "latency", "-m", model, *SMALL, "--json").json["profile"] is None


def test_a_profile_without_kernels_is_refused(cli: Cli, model: Path) -> None:
    done = cli("bench", "latency", "-m", model, *SMALL, "--profile", "--providers", "torch")
    assert "leave out --profile" in done.sentence


def test_throughput_as_json_tells_steps_and_batches(cli: Cli, model: Path) -> None:
    found = cli("bench", "throughput", "-m", model, *SMALL, "--concurrency", 3, "--json").json
    assert found["kind"] == "throughput" and found["load"]["requests"] == 3
    for row in found["repetitions"]:
        assert row["steps"] == 4 and row["mean_batch"] == 3
        assert row["output_tokens_per_s"] == pytest.approx(12 / row["output_seconds"])
        assert row["total_tokens_per_s"] == pytest.approx(48 / row["output_seconds"])


def test_one_token_has_a_first_but_no_decoding(cli: Cli, model: Path) -> None:
    small = ("--prompt-len", 12, "--output-len", 1, "--reps", 1, "--memory", "8MiB")
    found = cli("bench", "latency", "-m", model, *small, "--json").json
    assert found["summary"]["decode_tokens_per_s"] is None and found["summary"]["prefill_tokens_per_s"] is not None
    assert "decode tokens/s" not in cli("bench", "latency", "-m", model, *small).out


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (("sideways",), "No such command 'sideways'"),
        (("latency", "--concurrency", 4), "--concurrency"),
        (("throughput", "--concurrency", 0), "requests=0"),
        (("latency", "--reps", 0), "reps=0"),
        (("latency", "--prompt-len", 0), "prompt_len=0"),
        (("latency", "--output-len", -1), "output_len=-1"),
        (("latency", "--prompt-len", 400), "context of 528"),
        (("latency", "--prompt-len", 10**12), "more than"),
        (("latency", "--prompt-len", "many"), "--prompt-len"),
        (("latency", "--temperature", -1), "temperature"),
        (("latency", "--top-k", 40), "temperature above 0"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(cli: Cli, model: Path, bad: tuple[object, ...], says: str) -> None:
    assert says in cli("bench", *bad, "-m", model, "--memory", "8MiB").sentence


def test_a_missing_kind_or_model_is_refused(cli: Cli, model: Path) -> None:
    assert (
        "Choose a benchmark: latency, throughput, speculative, diffusion, policies, tradeoff, memory, "
        "serve, sweep, compare" in cli("bench").sentence
    )
    assert "/no/such" in cli("bench", "latency", "-m", "/no/such").sentence
