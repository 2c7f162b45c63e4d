"""`bankfull bench speculative`."""

from __future__ import annotations

from pathlib import Path

import pytest

from bankfull.ops import native
from tests.cli.conftest import Cli
from tests.tiny import speaking_folder


@pytest.mark.skipif(native.status() is not None, reason="the native kernels are missing")
def test_the_command_prints_a_table_a_chart_and_json(cli: Cli, tmp_path: Path) -> None:
    asked = ("bench", "speculative", "-m", speaking_folder(), "--with", "ngram", "--set", "chat", "--reps", 1)
    short = ("--output-len", 12)
    done = cli(*asked, *short, "--chart", tmp_path / "gain.svg")
    assert done.code == 0 and "ngram" in done.out and "chat" in done.out and "gain" in done.out
    assert (tmp_path / "gain.svg").read_text().startswith("<svg")
    done = cli(*asked, *short, "--json")
    [one] = done.json["sets"]
    assert one["speculative"] == "ngram" and one["prompts"] == "chat" and one["tokens_per_step"] >= 1
    assert "speculative='guess' is unknown" in cli(*asked, "--with", "guess").sentence
    assert "'poems' is unknown" in cli(*asked, "--set", "poems").sentence
    assert "must end in .svg or .png" in cli(*asked, "--chart", "gain.txt").sentence
