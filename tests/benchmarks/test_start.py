"""The benchmark of starts: real processes are started, and a model that is never kept prepared is refused."""

from __future__ import annotations

import pytest

from benchmarks import start
from tests.tiny import speaking_folder


def test_a_model_whose_weights_are_never_kept_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BANKFULL_CACHE", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, "")  # the benchmark changes them, and this takes the change back
    with pytest.raises(SystemExit, match="choose a model of more than 16 MiB"):
        start.main(["-m", str(speaking_folder()), "--starts", "1", "--parts", "starts"])


def test_a_process_tells_its_speed_and_memory() -> None:
    child = start.Child(str(speaking_folder()), kept=True)
    assert child.speed(2, 4) > 0 and child.memory("Rss") >= child.memory("Pss") > 0
    child.end()


def test_medians_come_with_quartiles() -> None:
    assert start.shown([1.0, 2.0]) == "1.50" and start.shown([1, 2, 3, 4, 5], 1) == "3.0 (1.5 to 4.5)"
