"""Waiting times follow queueing theory: Poisson arrivals at one server with constant service time are M/D/1.

First without a clock: arrivals through Lindley's recursion give the Pollaczek-Khinchine wait. Then with one: the
client's measurements of a queue equal that recursion, request by request.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, quantiles

import pytest

from bankfull.bench.load.client import LoadClient, RequestOptions
from bankfull.traffic.arrivals import Arrivals
from tests.bench.load.kit import make_conversations, simulated, stamped
from tests.bench.load.stamped_server import Line

SERVICE = 0.005


def lindley(offsets: Sequence[float], service: float) -> list[float]:
    """Time in the system of each request: waiting and service."""
    free, found = 0.0, []
    for offset in offsets:
        free = max(free, offset) + service
        found.append(free - offset)
    return found


def pollaczek_khinchine(load: float, service: float) -> float:
    """Mean time in an M/D/1 queue, service included."""
    return service + load * service / (2 * (1 - load))


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_poisson_arrivals_wait_as_long_as_the_formula_says(load: float) -> None:
    offsets = Arrivals(load / SERVICE).offsets(400_000, 7)
    assert fmean(lindley(offsets, SERVICE)) == pytest.approx(pollaczek_khinchine(load, SERVICE), rel=0.03)


def test_bursts_wait_longer_and_a_metronome_not_at_all() -> None:
    rate, count = 0.6 / SERVICE, 100_000
    bursty = fmean(lindley(Arrivals(rate, "gamma", 0.25).offsets(count, 1), SERVICE))
    poisson = fmean(lindley(Arrivals(rate).offsets(count, 1), SERVICE))
    even = fmean(lindley(Arrivals(rate, "constant").offsets(count, 1), SERVICE))
    assert bursty > 1.5 * poisson > 1.5 * even
    assert even == pytest.approx(SERVICE)


def test_what_the_client_measures_is_the_queue_itself() -> None:
    """At 60% load with a simulated clock: each latency equals the recursion over the same arrivals, so their mean is
    the formula's up to the sampling error of few arrivals."""
    load, count = 0.6, 4000
    offsets = Arrivals(load / SERVICE).offsets(count, 3)
    outcomes = simulated(Line(SERVICE, 0.0, 0.0), make_conversations(1, count), offsets)
    apart = sorted(abs(one.e2e - wait) for one, wait in zip(outcomes, lindley(offsets, SERVICE), strict=True))
    assert apart[-1] < 1e-6
    assert fmean(one.e2e for one in outcomes) == pytest.approx(pollaczek_khinchine(load, SERVICE), rel=0.1)


def test_the_client_measures_the_queue_in_real_time() -> None:
    """1.5 s of real time: the typical latency is within a millisecond of the recursion, in a run mostly without other
    load; noise only adds."""
    load, count = 0.5, 150
    found: list[float] = []
    with stamped(service=SERVICE) as server:
        for attempt in range(10):
            offsets = Arrivals(load / SERVICE).offsets(count, attempt)
            outcomes = sorted(
                LoadClient(server, RequestOptions()).run(make_conversations(1, count), offsets), key=lambda one: one.due
            )
            apart = [one.e2e - wait for one, wait in zip(outcomes, lindley(offsets, SERVICE), strict=True)]
            # Two waiting requests may swap, but all together cannot be served before the queue allows it.
            assert fmean(apart) > -1e-3
            found.append(quantiles(apart, n=4)[0])
            if found[-1] < 1e-3:
                return
    pytest.fail(f"three quarters of the requests were off by more than these seconds: {found}")
