"""`quality`: what it prints for readers and programs, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from .conftest import Cli

TEXT = "The river runs at the full capacity of its channel, and the engine fills it.\n" * 3
FIGURES = {"perplexity", "reference_perplexity", "ratio", "kl_mean", "kl_median", "kl_p99", "kl_max", "top1", "tokens"}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_the_reference_of_a_model_is_the_model_itself_without_shortcuts(cli: Cli, model: Path, text: Path) -> None:
    found = cli("quality", model, "--providers", "torch", "--dtype", "float32", "--text", text, "--json").json
    assert set(found) > FIGURES
    assert found["kl_max"] == 0 and found["ratio"] == 1 and found["window"] == 256 and found["bits_per_weight"] == 32
    shown = cli("quality", model, "--providers", "torch", "--dtype", "float32", "--text", text)
    assert "perplexity" in shown.out and "+0.000%" in shown.out and "100.00%" in shown.out and shown.err == ""


def test_a_coarser_dtype_costs_something(cli: Cli, model: Path, text: Path) -> None:
    found = cli("quality", model, "--dtype", "bfloat16", "--text", text, "--json").json
    rounded = (found["dtype"], found["activations"]) in (("float32", "bf16"), ("bfloat16", "float"))  # kernels or not
    assert rounded and 0 < found["kl_mean"] < 0.1


def test_the_bundled_text_is_the_default(cli: Cli, model: Path) -> None:
    found = cli("quality", model, "--providers", "torch", "--json").json
    assert found["text"] == "bundled" and found["tokens"] > 5000 and found["windows"] > 20


def test_weight_types_are_measured_by_rounding_to_them(cli: Cli, model: Path, text: Path) -> None:
    def rounded(*options: str) -> dict[str, float]:
        done = cli("quality", model, "--text", text, "--json", *options)
        assert done.code == 0, done.err
        return dict(done.json)

    fine, coarse = rounded("--quantize", "q8_0,keep"), rounded("--quantize", "q4_0,keep")
    tables = rounded("--quantize", "q4_0,keep", "--tables")
    assert 0 < fine["kl_mean"] < coarse["kl_mean"] < tables["kl_mean"]
    assert tables["bits_per_weight"] < coarse["bits_per_weight"] < fine["bits_per_weight"] < 32
    assert (
        "rounded to q4_0,keep with the tables"
        in cli("quality", model, "--text", text, "--quantize", "q4_0,keep", "--tables").out
    )


def test_llm_int8_and_fp8_are_measured_like_other_types(cli: Cli, model: Path, text: Path) -> None:
    for wanted in ("llm.int8", "fp8"):
        done = cli("quality", model, "--text", text, "--json", "--quantize", wanted)
        assert done.code == 0, done.err
        assert done.json["quantize"] == wanted and 0 < done.json["kl_mean"] < 0.1
        assert done.json["bits_per_weight"] < 32 and not done.json["tables"]
    refused = cli("quality", model, "--text", text, "--quantize", "llm.int8", "--tables")
    assert refused.code != 0 and "keeps embeddings and the head" in refused.err
    for command in ("quality", "serve", "run"):
        assert "llm.int8" in cli(command, "--help").out


def test_chunks_are_compared_with_one_token_at_a_time(cli: Cli, model: Path, text: Path) -> None:
    options = ("quality", model, "--text", text, "--window", "40", "--chunks")
    found = cli(*options, "--json").json["chunks"]
    assert list(found) == ["8", "40"] and all(entry["kl_mean"] < 1e-6 for entry in found.values())
    assert "against one at a time" in cli(*options).out


def test_another_model_may_be_the_reference_if_it_shares_the_vocabulary(
    cli: Cli, model: Path, tmp_path: Path, text: Path
) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    assert (
        cli("quality", model, "--against", other, "--providers", "torch", "--text", text, "--json").json["kl_max"] == 0
    )
    tokens = json.loads((other / "tokenizer.json").read_text())
    vocab = tokens["model"]["vocab"]
    vocab["A"], vocab["B"] = vocab["B"], vocab["A"]
    (other / "tokenizer.json").write_text(json.dumps(tokens))
    assert "different vocabularies" in cli("quality", model, "--against", other, "--text", text).sentence


def test_bad_input_gets_one_sentence(cli: Cli, model: Path, tmp_path: Path, text: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    empty = tmp_path / "empty"
    empty.write_text("")
    for options, said in {
        ("--quantize", "int5"): "'int5'",
        ("--quantize", "q4_k"): "columns",
        ("--tables",): "--quantize",
        ("--text", tmp_path / "none"): "cannot be read",
        ("--text", tmp_path): "cannot be read",
        ("--text", binary): "UTF-8",
        ("--text", empty): "no token to predict",
        ("--text", text, "--window", 1000): "256 positions",
        ("--text", text, "--chunk", 300): "at most the window",
        ("--window", 1): "window",
        ("--dtype", "int8"): "dtype",
        ("--providers", "magic"): "providers",
        ("--against", "nobody"): "nobody",
    }.items():
        assert said in cli("quality", model, *options).sentence, options


def test_eviction_tells_its_cost_in_perplexity_and_recall_beside_the_bytes_it_saves(
    cli: Cli, model: Path, text: Path
) -> None:
    asked = ("quality", model, "--providers", "torch", "--dtype", "float32", "--text", text, "--kv-evict")
    found = cli(*asked, "sinks:4,window:16", "--json").json
    assert found["kv_evict"] == "sinks:4,window:16" and found["kl_mean"] > 0
    assert 0 < found["state_bytes"] < found["whole_state_bytes"] / 3
    assert 0 <= found["recall"] <= 1 and 0 <= found["reference_recall"] <= 1
    shown = cli(*asked, "sinks:4,window:16").out
    assert "all but sinks:4,window:16 (lossy)" in shown and "% less than" in shown and "recall" in shown
    assert "nothing would be evicted" in cli(*asked, "sinks:4,window:400").sentence
