"""`info`, `limits`, `doctor` and `pull`: what they tell, for readers and for programs."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import bankfull
from bankfull.limits.machine.ceilings import Ceilings
from bankfull.limits.machine.disk import Disk
from bankfull.limits.machine.levels import Level, Levels

from .conftest import Cli


def test_info_describes_a_model(cli: Cli, model: Path) -> None:
    shown = cli("info", model)
    assert shown.code == 0 and "llama" in shown.out and "─" not in shown.out
    found = cli("info", model, "--json").json
    assert found["architecture"] == "llama" and found["layers"] == 2 and found["context_length"] == 256
    assert found["chat_template"] is True and "roofline" not in found


def test_info_with_roofline_names_the_bound_of_every_operation(cli: Cli, model: Path) -> None:
    rooflines = cli("info", model, "--roofline", "--json").json["roofline"]
    assert len(rooflines) == 2
    for rows in rooflines.values():
        assert rows[-1]["operation"] == "total" and {row["bound"] for row in rows} <= {"memory", "arithmetic"}
        assert sum(row["share"] for row in rows[:-1]) == pytest.approx(1)
    assert "linear" in cli("info", model, "--roofline").out


def test_info_lists_the_weights_by_name_with_their_axes(cli: Cli, model: Path) -> None:
    assert "weights" not in cli("info", model, "--json").json
    found = cli("info", model, "--weights", "--json").json
    by_name = {weight["name"]: weight for weight in found["weights"]}
    key = by_name["model.layers.0.self_attn.k_proj.weight"]
    assert [[part["kind"] for part in axis] for axis in key["axes"]] == [["kv_heads"], ["hidden"]]
    heads = key["axes"][0][0]
    assert [heads["count"] * heads["each"], found["shape"]["hidden"]] == key["shape"]
    assert key["home"] == "resident" and key["generation"] == 0
    assert sum(weight["bytes"] for weight in found["weights"]) == found["total_bytes"]
    shown = cli("info", model, "--weights").out
    assert "model.layers.1.mlp.down_proj.weight" in shown and "neurons" in shown


@pytest.fixture
def levels(monkeypatch: pytest.MonkeyPatch) -> Levels:
    known = Levels(
        (Level("L1", 1000, 500, 5e10), Level("memory", 0, 10**9, 1e10)),
        ((500, 5e10), (10**9, 1e10)),
        Disk(2e9, 1000, "direct reads"),
        None,
        None,
        "today",
    )
    monkeypatch.setattr("bankfull.limits.machine.levels.measure", lambda *arguments: known)
    return known


def test_limits_are_those_of_the_machine(cli: Cli, ceilings: Ceilings, levels: Levels) -> None:
    found = cli("limits", "--json").json
    assert {name: found[name] for name in asdict(ceilings)} == asdict(ceilings)
    assert found["levels"][0] == {"name": "L1", "capacity_bytes": 1000, "set_bytes": 500, "bytes_per_s": 5e10}
    assert found["disk"]["bytes_per_s"] == 2e9 and found["to_device"] is None and len(found["curve"]) == 2
    shown = cli("limits").out
    for part in ("read from L1, 500 B", "50 GB/s", "disk, direct reads", "2 GB/s", "Roofline: a cpu", "10 FLOP/B"):
        assert part in shown, part
    assert "Read bandwidth by working set" in shown and "copy" not in shown


def test_limits_draws_the_roofline_into_a_file(cli: Cli, levels: Levels, tmp_path: Path) -> None:
    path = tmp_path / "roofline.svg"
    assert cli("limits", "--svg", path, "--json").code == 0
    assert "Roofline: a cpu" in path.read_text()
    assert cli("limits", "--png", tmp_path / "roofline.png", "--json").code == 0
    assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG")
    assert "must end in .svg" in cli("limits", "--svg", tmp_path / "roofline.png").sentence
    assert "must end in .png" in cli("limits", "--png", tmp_path / "roofline.svg").sentence
    assert "there is no directory" in cli("limits", "--svg", tmp_path / "none" / "roofline.svg").sentence


def test_a_picture_that_cannot_be_made_is_refused_before_anything_is_measured(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    monkeypatch.setattr("bankfull.limits.machine.ceilings.measure", lambda *arguments: pytest.fail("measured"))
    assert "bankfull[charts]" in cli("limits", "--png", tmp_path / "roofline.png").sentence


def test_limits_shows_a_device_of_the_catalogue_and_what_is_doubtful(cli: Cli) -> None:
    shown = cli("limits", "--device", "h200")
    assert shown.code == 0 and shown.err == ""
    assert "4.8 TB/s" in shown.out and "ridge at 206 FLOP/byte" in shown.out and "Roofline: NVIDIA H200" in shown.out
    assert cli("limits", "--device", "h200", "--json").json["bytes_per_s"] == 4.8e12
    doubtful = cli("limits", "--device", "wse-3", "--json")
    assert doubtful.json["unverified"] is True and "unverified" in doubtful.err
    assert "did you mean h200" in cli("limits", "--device", "h20").sentence


def test_limits_lists_the_catalogue_with_a_users_own_file(cli: Cli, tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text('[[device]]\nname = "h100"\ndollars_per_hour = 1.5\n')
    shown = cli("limits", "--list", "--catalogue", own).out
    assert "$1.50" in shown and "cpu-laptop ?" in shown
    prices = {device["name"]: device["dollars_per_hour"] for device in cli("limits", "--list", "--json").json}
    assert prices["h100"] == 2.95 and prices["gaudi-3"] is None
    assert "cannot be read" in cli("limits", "--list", "--catalogue", tmp_path / "none.toml").sentence


def test_doctor_tells_what_a_bug_report_needs_and_no_secrets(
    cli: Cli, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret_token")
    monkeypatch.setenv("HOME", str(cache.parent))
    cache.mkdir()
    (cache / "file").write_bytes(b"12345")
    done = cli("doctor", "--json")
    found = done.json
    assert found["versions"]["bankfull"] == bankfull.__version__ and found["versions"]["torch"]
    assert found["machine"]["cores"] >= 1 and found["devices"]["cpu"] == "yes"
    assert found["kernels"]["native"]
    assert found["cache"] == {"directory": "~/cache", "bytes": 5, "files": 1}
    assert "bankfull limits" in found["limits"]["measured"]
    for text in (done.out, cli("doctor").out):
        assert "hf_secret_token" not in text and str(cache.parent) not in text


def test_doctor_shows_limits_that_were_measured(
    cli: Cli, cache: Path, ceilings: Ceilings, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bankfull.limits.machine import ceilings as module

    monkeypatch.undo()
    monkeypatch.setenv("BANKFULL_CACHE", str(cache))
    monkeypatch.setattr("bankfull.limits.machine.cpu_ceilings.measure", lambda budget, identity: ceilings)
    module.measure()
    assert json.loads(cli("doctor", "--json").out)["limits"] == asdict(ceilings)


def test_doctor_shows_ceilings_that_were_not_measured_or_are_converted(
    cli: Cli, ceilings: Ceilings, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bankfull.limits.machine import ceilings as module

    partly = replace(ceilings, converted={"bfloat16": "float32"}, unmeasured={"float16": "torch does not use it"})
    monkeypatch.setattr(module, "known", lambda: partly)
    shown = cli("doctor").out
    assert "float16 not measured" in shown and "bfloat16 float32" in shown


def test_pull_prints_where_the_model_is(cli: Cli, model: Path) -> None:
    assert cli("pull", model).out == f"{model}\n"


@pytest.mark.parametrize("command", ["info", "pull"])
def test_an_unknown_model_gets_one_sentence(cli: Cli, command: str) -> None:
    assert "smollm2" in cli(command, "smollm").sentence
