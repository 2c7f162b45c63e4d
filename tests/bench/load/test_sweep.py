"""The search for the highest rate, on servers with a known result."""

from __future__ import annotations

import random

import pytest

from bankfull.bench.load.sweep import Found, Search
from bankfull.bench.report.sweep import answer
from bankfull.errors import ConfigError
from bankfull.traffic.arrivals import Arrivals


@pytest.mark.parametrize("limit", [0.02, 0.3, 1.0, 17.3, 640.0])
def test_it_comes_as_near_to_the_limit_as_asked(limit: float) -> None:
    found = Search(precision=0.02).run(lambda rate, number: 1.0 if rate <= limit else 0.2)
    assert found.rate is not None and found.failed is not None
    assert found.rate <= limit < found.failed <= found.rate * 1.02
    assert [trial.confirming for trial in found.tried[-2:]] == [True, True]
    assert len(found.tried) < 40


def test_every_trial_has_a_number_of_its_own() -> None:
    seen: list[int] = []
    Search().run(lambda rate, number: seen.append(number) or (1.0 if rate < 5 else 0.0))  # type: ignore[func-returns-value]
    assert seen == list(range(len(seen)))


def test_a_lucky_pass_is_not_confirmed() -> None:
    """Above 10 the trials pass half of the time: the result is a rate at which they always do."""
    luck = random.Random(4)

    def trial(rate: float, number: int) -> float:
        return 1.0 if rate <= 10 or luck.random() < 0.5 else 0.0

    for _ in range(20):
        found = Search(confirmations=8).run(trial)
        assert found.rate is not None and found.rate <= 10.5
        passed = [trial.passed for trial in found.tried if trial.rate == found.rate]
        assert all(passed) and len(passed) >= 9


def test_a_server_that_never_fails_and_one_that_never_passes() -> None:
    best = Search(highest=100.0).run(lambda rate, number: 0.95)
    assert best.rate == 100.0 and best.failed is None
    none = Search().run(lambda rate, number: 0.5)
    assert none.rate is None and none.failed is not None and none.failed < 0.02
    assert "No rate was found" in answer(none, Search(), "ttft=1s")
    assert "100 requests/s is the highest" in answer(best, Search(), "ttft=1s")


def test_on_a_queue_it_finds_the_rate_of_the_theory() -> None:
    """M/D/1 with a service time of 10 ms and 90% within 30 ms: simulated once in detail, then searched for."""
    service, limit = 0.01, 0.03

    def attained(rate: float, count: int, seed: int) -> float:
        free, good = 0.0, 0
        for offset in Arrivals(rate).offsets(count, seed):
            free = max(free, offset) + service
            good += free - offset <= limit
        return good / count

    low, high = 50.0, 100.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if attained(middle, 100_000, 1) >= 0.9 else (low, middle)
    found = Search(first=5.0, precision=0.02).run(lambda rate, number: attained(rate, 20_000, number))
    assert found.rate == pytest.approx(low, rel=0.06)


def test_the_curve_is_the_mean_of_the_trials() -> None:
    found = Search(first=4.0).run(lambda rate, number: 1.0 if rate <= 6 else 0.0)
    curve = found.curve()
    assert [rate for rate, _ in curve] == sorted(rate for rate, _ in curve)
    assert all(part == (1.0 if rate <= 6 else 0.0) for rate, part in curve)
    assert isinstance(found, Found) and found.as_json()["trials"][0]["rate"] == 4.0


@pytest.mark.parametrize(
    "bad",
    [
        {"first": 0.0},
        {"first": 5.0, "highest": 1.0},
        {"target": 0.0},
        {"target": 1.1},
        {"precision": 0.0},
        {"confirmations": -1},
        {"highest": float("inf")},
    ],
)
def test_searches_that_cannot_end_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Search(**bad)  # type: ignore[arg-type]
