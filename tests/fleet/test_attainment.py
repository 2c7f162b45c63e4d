"""Which requests meet the latency objectives of the server."""

from __future__ import annotations

import pytest

from bankfull.fleet.attainment import SloMeter
from bankfull.traffic.slo import parse_slo


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def meter(text: str = "ttft=500ms, tpot=50ms") -> tuple[SloMeter, Clock]:
    clock = Clock()
    return SloMeter(parse_slo(text), clock), clock


@pytest.mark.parametrize(
    ("slo", "times", "met"),
    [
        ("ttft=500ms, tpot=50ms", [0.4, 0.44, 0.5], True),
        ("ttft=500ms", [0.6], False),
        ("tpot=50ms", [9.0, 9.04, 9.2], False),
        ("tpot=50ms", [9.0], True),
        ("itl=100ms", [9.0, 9.01, 9.12, 9.13], False),
        ("itl=100ms", [9.0, 9.01, 9.02], True),
        ("e2e=1s", [0.5, 1.1], False),
    ],
)
def test_each_objective_is_judged_at_the_end(slo: str, times: list[float], met: bool) -> None:
    counted, _ = meter(slo)
    goals = counted.begin(0.0)
    for now in times:
        goals.tokens(now)
    assert counted.take() == (0, 0), "it still runs"
    goals.end(times[-1], len(times), 1)
    goals.leave()
    assert counted.take() == (1, int(not met))
    assert counted.take() == (0, 0) and counted.met + counted.missed == 1


def test_samples_share_the_time_per_token() -> None:
    counted, _ = meter("tpot=50ms")
    goals = counted.begin(0.0)
    for step in range(11):
        goals.tokens(0.04 * step)
    goals.end(0.4, 22, 2)
    assert counted.take() == (1, 0)


def test_a_request_that_waits_too_long_is_missed_before_it_ends_and_only_once() -> None:
    counted, clock = meter()
    early, late = counted.begin(0.0), counted.begin(0.3)
    clock.now = 0.6
    assert counted.take() == (1, 1)
    late.tokens(0.6)
    clock.now = 2.0
    early.tokens(2.0)
    early.end(2.0, 1, 1)
    late.end(0.65, 2, 1)
    assert counted.take() == (1, 0) and (counted.met, counted.missed) == (1, 1)


def test_a_client_that_leaves_is_not_judged() -> None:
    counted, clock = meter()
    counted.begin(0.0).leave()
    clock.now = 9.0
    assert counted.take() == (0, 0)


@pytest.mark.parametrize(("gap", "met"), [(0.09, 1), (0.12, 0)])
def test_a_caller_may_measure_the_gaps_itself(gap: float, met: int) -> None:
    found, _ = meter("tpot=50ms, itl=100ms")
    goals = found.begin(0.0)
    goals.tokens(1.0)
    goals.tokens_until(1.4, gap)
    goals.end(1.4, 11, 1)
    assert (found.met, found.missed) == (met, 1 - met)
