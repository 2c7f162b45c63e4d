"""The benchmark of forced acceptance itself, with a tiny model on this machine's CPU."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.gpu.forced import ACCEPTANCE, KnownAnswer, main


def test_the_right_paths_are_as_long_as_the_wanted_acceptance_makes_them() -> None:
    strategy = KnownAnswer(False, 31)
    right = strategy._wrong() == 0
    depths = right.sum(1)
    reached = np.array([(depths >= depth).mean() for depth in range(1, len(ACCEPTANCE) + 1)])
    assert reached == pytest.approx(np.cumprod(ACCEPTANCE), abs=5e-3)
    assert strategy.expected == pytest.approx(1 + np.cumprod(ACCEPTANCE).sum())
    parents = strategy.tree.parents
    below = parents >= 0
    assert not (right[:, below] & ~right[:, parents[below]]).any(), "a right draft has right ones above it"


def test_steps_accept_as_many_drafts_as_are_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    arguments = (
        "--shape qwen3-8b-tiny --device cpu --dtype float32 --batch 2 --drafts 7 --prompt 9 --outputs 90 --reps 1"
    )
    assert main([*arguments.split(), "--json", str(file)]) == 0
    plain, drafted = json.loads(file.read_text())
    assert (plain["tokens_per_step"], plain["gain"]) == (1.0, 1.0)
    assert drafted["tokens_per_step"] == pytest.approx(1 + float(np.cumprod(ACCEPTANCE).sum()), rel=0.08)
    assert "7 drafts" in capsys.readouterr().out
