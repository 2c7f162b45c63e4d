"""The benchmark of the server's overhead: a real server, and consistent figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import serving
from tests.tiny import speaking_folder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's counters of a process")


def test_the_servers_overhead_and_its_stages_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    options = ["--memory", "1MiB", "--requests", "2", "--words", "8", "--pause", "0.005", "--json", str(out)]
    assert serving.main(["--model", str(speaking_folder()), *options]) == 0
    made = json.loads(out.read_text())
    first = made["first"]
    assert set(first) == {"in-process", "stream", "whole"} and all(found["count"] == 2 for found in first.values())
    for kind, more in made["more"].items():
        assert more == pytest.approx(first[kind]["median"] - first["in-process"]["median"])
        assert all(made["usage"][kind][name]["wakeups"] >= 1 for name in ("api", "engine"))
    served = [first[kind]["median"] for kind in ("stream", "whole")]  # the median of two values is their mean
    assert sum(made["stages"].values()) == pytest.approx(sum(served) / 2)
    assert "more than in-process" in capsys.readouterr().out


def test_a_server_that_does_not_start_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert serving.main(["--model", str(tmp_path / "nothing")]) == 2
    assert "did not start" in capsys.readouterr().err
