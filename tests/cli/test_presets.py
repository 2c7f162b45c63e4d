"""Presets: models as data that come with the package, described without weights and trained by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bankfull.limits.meter.metered import MeteredModel
from bankfull.train.lm.study import configs, kinds, read_study
from bankfull.weights.hf_config import read_json
from bankfull.weights.locate import locate
from bankfull.weights.presets import preset_names
from tests.cli.conftest import Cli

MIXERS = ["attention", "based", "delta", "hybrid", "lightning", "mamba", "mamba2", "s4", "window"]


def test_the_study_has_every_mixer() -> None:
    assert kinds() == MIXERS


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_is_a_model(name: str) -> None:
    config = read_json(locate(name) / "config.json")
    assert MeteredModel(config).parameters > 0 and config["about"].endswith(".")


def test_states_of_a_sweep_grow() -> None:
    found: dict[str, list[int]] = {}
    for kind, _, config in configs(MIXERS):
        layout = MeteredModel(config).layout
        slot = 0 if layout.recurrent is None else layout.recurrent.slot_bytes
        found.setdefault(kind, []).append(slot + sum(g.token_bytes * min(128, g.window or 128) for g in layout.paged))
    assert all(sizes == sorted(set(sizes)) and len(sizes) > 1 for sizes in found.values())


def test_the_recipe_of_character_ai_stands_beside_its_claim(cli: Cli) -> None:
    info = cli("info", "character-ai", "--json").json
    token = 2 * 128 * 2  # a key and a value of one head in bfloat16
    last = info["savings"][-1]
    assert last["context"] == 32768 and last["claim"] == 20
    assert last["bytes"] == token * (15 * 1024 + 3 * 32768), "18 layers own keys and values, 15 of them in a window"
    assert last["plain_bytes"] == token * 36 * 32 * 32768
    assert "claimed: 20x" in cli("info", "character-ai").out
    found = cli("roofline", "character-ai", "--device", "h200", "--context", 8192, "--json").json
    plain = next(one for one in found["variants"] if one["name"].startswith("MHA"))
    assert plain["state_bytes"] > 200 * found["memory"]["state_bytes_per_sequence"]


@pytest.mark.parametrize("command", [("run", "hello", "--model"), ("quality",)])
def test_a_preset_without_weights_is_refused_with_the_way_out(cli: Cli, command: tuple[str, ...]) -> None:
    assert "bankfull train lm" in cli(*command, "recall-mamba").sentence


def test_a_misspelled_preset_is_named(cli: Cli) -> None:
    assert "did you mean 'recall-based'" in cli("info", "recall-bsed").sentence


def test_a_wrong_claim_gets_one_sentence(cli: Cli, tmp_path: Path) -> None:
    config: dict[str, Any] = read_json(locate("recall-window") / "config.json")
    (tmp_path / "config.json").write_text(json.dumps({**config, "claim": {"kv_bytes_factor": -1}}))
    assert "kv_bytes_factor" in cli("info", tmp_path).sentence


@pytest.mark.full
def test_the_study_writes_a_table_and_a_chart_and_continues(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "study"
    given = ("train", "recall-study", "-o", out, "--only", "window,based", "--length", 16, "--pairs", 2, "--steps", 2)
    done = cli(*given, "--batch", 4, "--device", "cpu", "--json")
    assert done.code == 0, done.err
    assert [point["kind"] for point in done.json["points"]] == ["window"] * 4 + ["based"] * 3
    assert "<svg" in (out / "recall.svg").read_text()
    again = cli(*given, "--batch", 4, "--device", "cpu", "--json")
    assert again.json == done.json
    assert read_study(out / "study.json").points[0].layers == "conv, local(8)"
    assert "no kind 'rnn'" in cli("train", "recall-study", "-o", out, "--only", "rnn").sentence


@pytest.mark.full
def test_a_published_shape_is_described_by_its_name(cli: Cli) -> None:
    assert 30.5e9 < cli("info", "qwen3-30b-a3b", "--json").json["parameters"] < 30.6e9
    found = cli("roofline", "deepseek-v2-lite", "--device", "h200", "--context", 4096, "--json").json
    assert found["memory"]["state_bytes_per_sequence"] == (512 + 64) * 2 * 27 * 4096
    assert not any("int8 KV cache" in one["name"] for one in found["variants"]), "a latent stays in floating point"
