"""Head-of-line blocking: the time behind others, and only that."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bankfull.sched.scheduler import Scheduler
from bankfull.scheduling import POLICIES
from bankfull.types import Output
from tests.sched.driver import Clock, request, result, scheduler


def timed_step(sched: Scheduler, clock: Clock, seconds: float = 1.0) -> list[Output]:
    plan = sched.plan()
    assert plan is not None
    clock.now += seconds
    sched.took(plan, seconds)
    return sched.settle(plan, result(plan))


def finished(sched: Scheduler, clock: Clock) -> dict[object, float]:
    """Run to the end; seconds that each request was blocked."""
    found: dict[object, float] = {}
    while sched.unfinished:
        for output in timed_step(sched, clock):
            if output.finish is not None:
                found[output.request] = max(output.blocked, found.get(output.request, 0.0))
    return found


def test_a_request_alone_is_never_blocked() -> None:
    clock = Clock()
    sched = scheduler(clock=clock, rows=1)
    sched.add(request(0))
    assert finished(sched, clock) == {0: 0.0}


def test_the_second_request_is_blocked_until_the_first_leaves_its_row() -> None:
    clock = Clock()
    sched = scheduler(clock=clock, rows=1)
    sched.add(request(0, more=4))
    clock.now = 2.5  # an idle engine blocks nobody
    timed_step(sched, clock)
    clock.now += 0.25
    sched.add(request(1, more=3))
    # Three more steps of the first one; then the second one runs.
    assert finished(sched, clock) == {0: 0.0, 1: 3.0}


def test_time_after_a_preemption_counts() -> None:
    clock = Clock()
    sched = scheduler(clock=clock, rows=1, policy="priority")
    sched.add(request(0, more=6, priority=5))
    for _ in range(2):
        timed_step(sched, clock)
    sched.add(request(1, more=4, priority=0))
    assert finished(sched, clock) == {0: 4.0, 1: 0.0}


def test_waiting_for_a_batch_to_be_complete_is_not_blocking_but_waiting_for_one_to_end_is() -> None:
    clock = Clock()
    sched = scheduler(clock=clock, rows=2, batching="static", batch_size=2)
    sched.add(request(0, more=2))
    assert sched.plan() is None
    clock.now = 10.0
    sched.add(request(1, more=5))
    sched.add(request(2, more=1))
    sched.sealed = True
    assert finished(sched, clock) == {0: 0.0, 1: 0.0, 2: 5.0}


def test_a_sample_is_not_blocked_by_the_prompt_that_it_shares() -> None:
    clock = Clock()
    sched = scheduler(clock=clock, rows=2, step_tokens=2)
    sched.add(request(0, length=9, more=2, samples=2))
    assert finished(sched, clock) == {0: 0.0}


@given(st.data())
def test_under_any_policy_blocked_time_is_waiting_time_with_others_running(data: st.DataObject) -> None:
    clock = Clock()
    policy = data.draw(st.sampled_from(sorted(POLICIES)))
    sched = scheduler(clock=clock, rows=2, frames=40, policy=policy, quantum_ms=1500.0)
    lengths = data.draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=7))
    coming = [request(i, length, more, priority=i % 3) for i, (length, more) in enumerate(lengths)]
    waited: dict[object, float] = dict.fromkeys(range(len(coming)), 0.0)
    found: dict[object, float] = {}
    while coming or sched.unfinished:
        while coming and (not sched.unfinished or data.draw(st.booleans())):
            sched.add(coming.pop(0))
        seconds = data.draw(st.sampled_from((0.5, 1.0, 2.0)))
        plan = sched.plan()
        assert plan is not None
        for seq in sched._waiting:
            waited[seq.request.id] += seconds
        clock.now += seconds
        for output in sched.settle(plan, result(plan)):
            if output.finish is not None:
                found[output.request] = output.blocked
    assert found == waited
