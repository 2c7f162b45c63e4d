"""`info`, `limits`, `doctor` and `pull`: what they tell, for readers and for programs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

import bankfull
from bankfull.limits.ceilings import Ceilings

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


def test_limits_are_those_of_the_machine(cli: Cli, ceilings: Ceilings) -> None:
    assert cli("limits", "--json").json == asdict(ceilings)
    assert "a cpu" in cli("limits").out


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
    from bankfull.limits import ceilings as module

    monkeypatch.undo()
    monkeypatch.setenv("BANKFULL_CACHE", str(cache))
    monkeypatch.setattr(module, "_measure", lambda budget, identity: ceilings)
    module.measure()
    assert json.loads(cli("doctor", "--json").out)["limits"] == asdict(ceilings)


def test_pull_prints_where_the_model_is(cli: Cli, model: Path) -> None:
    assert cli("pull", model).out == f"{model}\n"


@pytest.mark.parametrize("command", ["info", "pull"])
def test_an_unknown_model_gets_one_sentence(cli: Cli, command: str) -> None:
    assert "smollm2" in cli(command, "smollm").sentence
