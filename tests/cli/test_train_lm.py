"""`bankfull train lm`: from a configuration to a model that runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.models.composed import SIZES

SHORT = ("--length", 24, "--pairs", 3, "--steps", 6, "--measure-every", 3, "--batch", 8, "--device", "cpu")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    made = {**SIZES, "vocab_size": 256, "layers": "local(9), mamba(4, feed=none)"}
    (tmp_path / "config.json").write_text(json.dumps(made))
    return tmp_path / "config.json"


def test_a_model_is_trained_and_runs(cli: Cli, config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = cli("train", "lm", config, "-o", out, *SHORT, "--json")
    assert done.code == 0, done.err
    assert done.json["finished"] and [one["step"] for one in done.json["measured"]] == [0, 3, 6]
    ran = cli("run", "k1 v3 k2 v4 k1", "--model", out, "--max-tokens", 2, "--temperature", 0)
    assert ran.code == 0 and len(ran.out.split()) == 2
    shown = cli("train", "lm", config, "-o", out, *SHORT)
    assert "accuracy" in shown.out and f"--model {out}" in shown.out
    assert "another steps" in cli("train", "lm", config, "-o", out, *SHORT, "--steps", 7).sentence
    assert cli("quality", out, "--text", config, "--device", "cpu").code == 0


@pytest.mark.full
def test_text_is_bytes_without_a_tokenizer(cli: Cli, config: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("the river runs at full capacity. " * 20)
    out = tmp_path / "out"
    done = cli("train", "lm", config, "-o", out, *SHORT, "--task", "text", "--text", tmp_path / "text")
    assert done.code == 0, done.err
    ran = cli("run", "the ri", "--model", out, "--max-tokens", 3, "--temperature", 0)
    assert ran.code == 0 and ran.out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--task", "sort"), "'sort' is unknown; use recall, copy, text"),
        (("--task", "text"), "give --text FILE"),
        (("--task", "text", "--text", "gone.txt"), "gone.txt cannot be read"),
        (("--text", "some.txt"), "belong to --task text"),
        (("--pairs", 9), "cannot hold 9 pairs"),
        (("--length", 500), "exceeds the model's context"),
    ],
)
def test_bad_input_gets_one_sentence(cli: Cli, config: Path, tmp_path: Path, arguments: object, sentence: str) -> None:
    assert sentence in cli("train", "lm", config, "-o", tmp_path / "out", *SHORT, *arguments).sentence  # type: ignore[misc]
    assert not (tmp_path / "out").exists()


def test_only_models_as_data_are_trained(cli: Cli, model: Path, tmp_path: Path) -> None:
    assert "cannot be trained here" in cli("train", "lm", model, "-o", tmp_path / "out", *SHORT).sentence
