"""--quantize, --kv-dtype and --activations: every command takes them, and takes them to the engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bankfull import LLM, SamplingParams

from .conftest import Cli

SHORT = ("--max-tokens", 8, "--ignore-eos", "--temperature", 0)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LOSSY = ("--quantize", "int4", "--kv-dtype", "int8", "--activations", "float")


@pytest.fixture(scope="module")
def lossy(model: Path) -> LLM:
    return LLM(str(model), quantize="int4", kv_dtype="int8", activations="float")


def test_answers_are_those_of_the_engine_with_the_same_options(
    cli: Cli, model: Path, lossy: LLM, tmp_path: Path
) -> None:
    messages = [{"role": "user", "content": "The engine"}]
    [expected], [plain] = lossy.chat(messages, GREEDY), LLM(str(model)).chat(messages, GREEDY)
    wanted = expected.outputs[0]
    assert wanted.token_ids != plain.outputs[0].token_ids, "rounding changed nothing: the test proves nothing"
    assert cli("run", "The engine", "-m", model, *SHORT, *LOSSY, "--json").json["token_ids"] == wanted.token_ids
    assert cli("chat", "-m", model, *SHORT, *LOSSY, stdin="The engine\n").out.rstrip("\n") == wanted.text
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text(json.dumps({"messages": messages}) + "\n")
    assert cli("generate", "-i", given, "-o", out, "-m", model, *SHORT, *LOSSY).code == 0
    assert json.loads(out.read_text())["token_ids"] == wanted.token_ids
    # Results of another rounding are not taken for results of this one.
    assert cli("generate", "-i", given, "-o", out, "-m", model, *SHORT).sentence


def test_the_limit_is_that_of_the_weights_and_pages_as_they_are_stored(cli: Cli, model: Path) -> None:
    def limit(*options: str) -> float:
        found = cli("run", "The river", "-m", model, *SHORT, "--json", *options).json
        return float(found["metrics"]["limit_tokens_per_s"])

    plain, weights, both = limit(), limit("--quantize", "int4"), limit("--quantize", "int4", "--kv-dtype", "int8")
    assert plain < weights < both


def test_bench_takes_them_and_counts_what_they_store(cli: Cli, model: Path) -> None:
    def run(*options: str) -> tuple[float, dict[str, dict[str, int]]]:
        small = ("--prompt-len", 12, "--output-len", 4, "--reps", 1, "--memory", "8MiB", "--json")
        found = cli("bench", "latency", "-m", model, *small, *options).json
        row = found["repetitions"][0]
        return row["decode_bytes_per_s"] * row["decode_seconds"], found["operations"]

    (plain, _), (pages, operations), (all_, _) = run(), run("--kv-dtype", "int8"), run(*LOSSY)
    assert plain > pages > all_
    assert "write_pages_int8" in operations


def test_quality_measures_what_they_cost(cli: Cli, model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The river runs at the full capacity of its channel, and the engine fills it.\n" * 3)

    def measured(*options: str) -> dict[str, float]:
        done = cli("quality", model, "--text", text, "--json", *options)
        assert done.code == 0, done.err
        return dict(done.json)

    fine, coarse, blocks = (measured("--quantize", wanted) for wanted in ("int8", "int4", "q4_0,keep"))
    assert 0 < fine["kl_mean"] < coarse["kl_mean"]
    assert coarse["kl_mean"] == pytest.approx(blocks["kl_mean"])
    assert coarse["bits_per_weight"] == blocks["bits_per_weight"]
    assert fine["kept"] == coarse["kept"] == 2
    tables = measured("--quantize", "int4,tables")
    assert tables["tables"] and tables["bits_per_weight"] < coarse["bits_per_weight"]
    half, rounded = measured("--kv-dtype", "bfloat16"), measured("--kv-dtype", "int8")
    assert 0 < half["kl_mean"] < 0.1 and 0 < rounded["kl_mean"] < 0.1
    assert (half["dtype"], half["kv_dtype"], rounded["kv_dtype"]) == ("float32", "bfloat16", "int8")
    shown = cli("quality", model, "--text", text, "--quantize", "int4", "--kv-dtype", "int8").out
    assert "int8 keys" in shown and "2 matrices do not fit" in shown


@pytest.mark.parametrize("command", [("run", "x"), ("chat",), ("bench", "latency"), ("quality",)])
def test_what_cannot_be_is_refused_in_one_sentence(cli: Cli, model: Path, command: tuple[str, ...]) -> None:
    at = (model,) if command == ("quality",) else ("-m", model)
    for options, said in {
        ("--quantize", "int5"): "'int5'",
        ("--quantize", "int4:48"): "int4:64",
        ("--kv-dtype", "fp4"): "kv_dtype='fp4'",
        ("--activations", "int4"): "activations='int4'",
    }.items():
        assert said in cli(*command, *at, *options).sentence, options


@pytest.mark.parametrize("command", ["run", "chat", "generate", "bench latency", "bench throughput", "quality"])
def test_help_says_what_is_lossy_and_what_is_exact(cli: Cli, command: str) -> None:
    shown = " ".join(cli(*command.split(), "--help").out.split())
    assert "--quantize" in shown and "--kv-dtype" in shown and "--activations" in shown
    assert "lossy" in shown and "exact" in shown
