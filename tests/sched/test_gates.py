from __future__ import annotations

import pytest

from bankfull.config import SchedConfig
from bankfull.sched.gates import Dynamic, Static, gate_of
from tests.sched.driver import Clock, drain, request, scheduler, step


def test_continuous_batching_admits_all() -> None:
    assert gate_of(SchedConfig()).open(waiting=5, first_queued=0, running=9, now=0, sealed=False) == 5


def test_a_static_batch_waits_until_it_is_full() -> None:
    gate = Static(3)
    assert gate.open(2, 0, running=0, now=1e9, sealed=False) == 0
    assert gate.open(3, 0, running=0, now=0, sealed=False) == 3


def test_a_sealed_static_batch_starts_short() -> None:
    assert Static(3).open(2, 0, running=0, now=0, sealed=True) == 2
    assert Static(3).open(0, 0, running=0, now=0, sealed=True) == 0


def test_no_sequence_joins_a_static_batch_that_runs() -> None:
    gate = Static(2)
    assert gate.open(2, 0, running=0, now=0, sealed=True) == 2
    gate.admitted()
    assert gate.open(4, 0, running=1, now=0, sealed=True) == 1
    gate.admitted()
    assert gate.open(4, 0, running=2, now=0, sealed=True) == 0


def test_an_aborted_member_leaves_no_seat_in_a_static_batch() -> None:
    gate = Static(2)
    assert gate.open(2, 0, running=0, now=0, sealed=False) == 2
    gate.admitted()
    assert gate.open(0, 0, running=1, now=0, sealed=False) == 0
    assert gate.open(3, 0, running=1, now=0, sealed=False) == 0


def test_a_dynamic_batch_starts_when_its_first_request_has_waited_long_enough() -> None:
    gate = Dynamic(4, delay=2.0)
    assert gate.open(3, first_queued=10.0, running=0, now=11.9, sealed=False) == 0
    assert gate.wake_at(3, first_queued=10.0) == 12.0
    assert gate.open(3, first_queued=10.0, running=0, now=12.0, sealed=False) == 3


def test_later_arrivals_do_not_move_the_deadline_of_a_dynamic_batch() -> None:
    clock = Clock()
    sched = scheduler(clock=clock, batching="dynamic", batch_size=10, batch_timeout=5.0)
    sched.add(request(0))
    clock.now = 4.0
    sched.add(request(1))
    assert sched.plan() is None and sched.wake_at() == 5.0
    clock.now = 5.0
    plan = sched.plan()
    assert plan is not None and len(plan.enter) == 2
    assert sched.wake_at() is None


def test_the_deadline_follows_when_the_first_request_is_aborted() -> None:
    clock = Clock()
    sched = scheduler(clock=clock, batching="dynamic", batch_size=10, batch_timeout=5.0)
    sched.add(request(0))
    clock.now = 4.0
    sched.add(request(1))
    sched.abort(0)
    assert sched.wake_at() == 9.0


@pytest.mark.parametrize("batching", ["static", "dynamic"])
def test_batches_run_one_after_the_other(batching: str) -> None:
    sched = scheduler(batching=batching, batch_size=2, batch_timeout=0.0)
    for i in range(4):
        sched.add(request(i))
    step(sched)
    assert sched.running == 2
    while sched.running:
        assert sched.waiting == 2
        step(sched)
    step(sched)
    assert (sched.running, sched.waiting) == (2, 0)
    assert len(drain(sched)) == 2


def test_forks_count_as_members_of_a_static_batch() -> None:
    sched = scheduler(batching="static", batch_size=2)
    sched.add(request(0, length=1, samples=2))
    sched.add(request(1))
    step(sched)
    assert (sched.running, sched.waiting) == (2, 1)


def test_a_preempted_member_keeps_the_next_batch_waiting() -> None:
    """It has no row for a moment, but its batch has not ended."""
    sched = scheduler(frames=7, batching="static", batch_size=2, rows=3)
    for i in range(4):
        sched.add(request(i, length=6, more=14) if i < 2 else request(i, length=2, more=1))
    while {0, 1} & set(sched._by_request):
        assert {seq.request.id for seq in sched._running} <= {0, 1}, "a member of the next batch runs"
        step(sched)
    assert sched.preemptions and len(drain(sched)) == 2


def test_a_scheduler_is_stuck_until_something_arrives_or_the_batch_is_due() -> None:
    clock = Clock()
    sched = scheduler(clock=clock, batching="static", batch_size=2)
    sched.add(request(0))
    assert not sched.stuck
    assert sched.plan() is None and sched.stuck and sched.wake_at() is None
    sched.add(request(1))
    assert not sched.stuck
    step(sched)
    assert not sched.stuck


@pytest.mark.parametrize("event", ["abort", "seal"])
def test_what_may_open_the_gate_ends_being_stuck(event: str) -> None:
    sched = scheduler(batching="static", batch_size=3)
    sched.add(request(0))
    sched.add(request(1))
    assert sched.plan() is None and sched.stuck
    if event == "abort":
        sched.abort(0)
    else:
        sched.sealed = True
    assert not sched.stuck
