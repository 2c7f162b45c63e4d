"""The client reports its stalls and their cause."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import replace

import pytest

from bankfull.bench.load import stalls
from bankfull.bench.load.clock import SWITCH, PreciseLoop, run_precisely
from bankfull.bench.load.measures import Measured
from bankfull.bench.load.stalls import Stall, StallWatch, sums, worst_at
from bankfull.bench.report.report import LoadReport
from bankfull.traffic.slo import Slo
from tests.bench.load.kit import outcome
from tests.bench.load.test_reports import report


class Hands:
    """Fake wall time, CPU time of the thread, and time waiting for a core."""

    wall = used = waited = 0.0


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Hands:
    found = Hands()
    monkeypatch.setattr(stalls, "monotonic", lambda: found.wall)
    monkeypatch.setattr(stalls, "thread_time", lambda: found.used)
    monkeypatch.setattr(StallWatch, "_waiting", lambda watch: found.waited)
    return found


def test_each_kind_of_stall_is_distinguished(hands: Hands) -> None:
    watch = StallWatch()
    hands.wall, hands.used = 0.010, 0.009
    watch.goes_to_sleep(0.5)  # ten milliseconds of CPU time
    hands.wall = 0.513
    watch.wakes()  # three milliseconds late
    watch.goes_to_sleep(None)
    hands.wall, hands.waited = 1.0, 0.004
    watch.wakes()  # woken by an event, after waiting four milliseconds for a core
    hands.wall, hands.used = 1.002, 0.0091
    watch.goes_to_sleep(0.0)  # two milliseconds between sleeps, almost none of them CPU time
    watch.wakes()
    found = [(round(1e3 * stall.seconds, 6), stall.by_machine) for stall in watch.stalls]
    assert found == [(10.0, False), (3.0, True), (4.0, True), (2.0, True)]
    by_machine, by_itself = sums(watch.stalls)
    assert (by_machine.times, by_itself.times) == (3, 1)
    assert by_machine.longest == pytest.approx(0.004) and by_itself.seconds == pytest.approx(0.010)


def test_a_loop_that_wakes_in_time_notes_nothing(hands: Hands) -> None:
    watch = StallWatch()
    for _ in range(100):
        hands.wall += 1e-4
        hands.used += 1e-4
        watch.goes_to_sleep(0.01)
        hands.wall += 0.01005
        watch.wakes()
    assert watch.stalls == []


def test_a_callback_that_works_long_is_the_clients_own_fault_and_one_that_sleeps_is_not() -> None:
    async def work() -> list[Stall]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, PreciseLoop)
        await asyncio.sleep(0)
        ready, began = time.monotonic() - 1e-3, time.thread_time()
        while time.thread_time() - began < 0.03:
            pass
        await asyncio.sleep(0)
        time.sleep(0.05)
        await asyncio.sleep(0)
        return [stall for stall in loop.stalls if stall.begin >= ready]

    found = run_precisely(work)
    own = [stall for stall in found if stall.own >= 0.03]
    assert len(own) == 1
    assert any(stall.by_machine and stall.seconds >= 0.05 for stall in found)


def test_another_thread_that_works_does_not_keep_the_loop_for_long() -> None:
    """By default the interpreter lets a thread, such as a progress bar, run for up to five milliseconds at a time."""
    usual = sys.getswitchinterval()

    async def within() -> float:
        return sys.getswitchinterval()

    assert run_precisely(within) == pytest.approx(SWITCH) and usual / 5 > SWITCH
    assert sys.getswitchinterval() == usual


def test_a_moment_is_moved_by_the_longest_stall_that_reaches_it() -> None:
    short, long, after = Stall(1.0, 1.001, 0.0), Stall(1.0012, 1.005, 0.0), Stall(3.0, 3.1, 0.1)
    some = [short, long, after]
    assert worst_at(some, 1.0015) is long and worst_at(some, 1.0055) is long
    assert worst_at(some, 1.0005) is short
    assert worst_at(some, 0.9) is None and worst_at(some, 2.0) is None and worst_at(some, 4.0) is None
    assert worst_at([], 1.0) is None


def test_a_report_counts_the_requests_that_a_stall_affected() -> None:
    some = [outcome(float(n), (n + 0.2, n + 0.4)) for n in range(10)]
    noted = (Stall(3.19, 3.25, 0.0), Stall(5.3, 5.31, 0.01), Stall(7.0, 7.0005, 0.0))
    measured = Measured(some, Slo())
    told = LoadReport(report().setting, measured, stalls=noted)
    assert told.disturbed == 1, "one is between two relevant times, another is shorter than a millisecond"
    assert any("a stall of the client" in line for line in told.warnings())
    kept = told.as_json()["client_stalls"]
    assert kept["by_machine"]["times"] == 2 and kept["by_itself"]["longest"] == pytest.approx(0.01)
    assert kept["disturbed_requests"] == 1
    stamped = LoadReport(report().setting, Measured([replace(one, stamped=True) for one in some], Slo()), stalls=noted)
    assert stamped.disturbed == 0, "token times are kernel timestamps; only the sending depends on the client"
    sent = LoadReport(report().setting, stamped.measured, stalls=(Stall(3.99, 4.0, 0.0),))
    assert sent.disturbed == 1
    joined = [replace(one, stamped=True, times=(one.times[0], one.times[0], one.times[1])) for one in some]
    assert LoadReport(report().setting, Measured(joined, Slo()), stalls=noted).disturbed == 1, (
        "merged packets have the later timestamp"
    )
    calm = LoadReport(report().setting, measured)
    assert calm.disturbed == 0 and not calm.warnings()
