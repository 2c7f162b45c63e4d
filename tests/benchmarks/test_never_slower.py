"""The benchmark of drafts beside plain decoding counts pairs, and forgets what was measured for cold ones."""

from __future__ import annotations

import json

import pytest

from benchmarks.never_slower import TEXTS, main
from tests.tiny import speaking_folder


def test_pairs_are_cold_and_warm_and_give_the_same_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(speaking_folder())
    sizes = ["--pairs", "1", "--output-len", "24", "--memory", "8MiB", "--max-len", "256", "--json"]
    always = f"draft:{folder},depth=2,adaptive=false"  # so that it drafts whatever the seconds are
    main([folder, "--speculative", always, "--kind", "chat", *sizes])
    report = json.loads(capsys.readouterr().out)
    assert [one["cold"] for one in report["summaries"]] == [True, False]
    for one in report["summaries"]:
        assert one["same_tokens"] and one["ratio"]["median"] > 0 and one["steps_without_drafts"] >= one["steps"]
        assert one["drafter_passes"] and one["accepted"] == one["drafted"], "the drafter is the model itself"


def test_it_has_every_kind_of_prompts() -> None:
    assert set(TEXTS) == {"code", "chat", "copying", "adversarial"}
