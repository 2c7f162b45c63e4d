"""Sequences that leave, come back, end or fork while a step that carries them is in flight."""

from __future__ import annotations

import pytest

from bankfull.config import StateConfig
from bankfull.sched.scheduler import Scheduler
from bankfull.types import StepPlan
from tests.sched.driver import TOKEN, drain, request, result, scheduler


def planned(sched: Scheduler) -> StepPlan:
    plan = sched.plan()
    assert plan is not None
    return plan


@pytest.mark.parametrize("cache", (True, False))
def test_a_result_from_before_a_preemption_is_dropped_although_the_sequence_runs_again(cache: bool) -> None:
    """The older step's result is not that of the sequence's newest work."""
    sched = scheduler(state=StateConfig(page_tokens=4, prefix_cache=cache))
    sched.add(request(0, length=5, more=4))
    first = planned(sched)
    sched._preempt(sched._running[0])
    second = planned(sched)
    assert [enter.row for enter in second.enter] == [work.row for work in second.work], "it runs again at once"
    assert sched.settle(first, result(first, TOKEN + 1)) == []
    (output,) = sched.settle(second, result(second))
    assert output.tokens == [TOKEN]
    assert drain(sched)[0, 0].finish == "length"
    sched.state.check()


def test_a_parked_sequence_runs_again_while_a_step_with_it_is_in_flight() -> None:
    """That step writes only what is computed again, and the device runs steps in order: waiting gains nothing."""
    sched = scheduler()
    sched.add(request(0, length=6, more=6))
    for _ in range(2):
        plan = planned(sched)
        sched.settle(plan, result(plan))
    flying = planned(sched)
    sched._preempt(sched._running[0])
    again = planned(sched)
    (enter,) = again.enter
    assert enter.computed == 7 and len(enter.tokens) == 8, "nothing of its settled state is computed again"
    assert sched.settle(flying, result(flying)) == []
    assert sched.settle(again, result(again))[0].tokens == [TOKEN]
    sched.state.check()


def test_no_step_is_planned_for_a_sequence_whose_last_token_is_in_flight() -> None:
    sched = scheduler()
    sched.add(request(0, length=5, more=2))
    first, second = planned(sched), planned(sched)
    assert sched.plan() is None, "a third step would compute a token that nobody wants"
    sched.settle(first, result(first))
    (output,) = sched.settle(second, result(second))
    assert output.finish == "length" and not sched.unfinished


def test_siblings_fork_when_the_prompt_has_settled_and_no_step_flies() -> None:
    """Until they have forked, their parent stops before its last prompt token: so no work of it can be in flight."""
    sched = scheduler(rows=4, step_tokens=3)
    sched.add(request(0, length=8, more=3, samples=3))
    (parent,) = sched._waiting[:1]
    flying = []
    while not any(enter.child for plan in flying for enter in plan.enter):
        plan = sched.plan()
        assert parent.start <= parent.prompt_len - 1 or not parent.children
        if plan is not None:
            flying.append(plan)
            assert not (parent.children and parent.flying and parent.computed == parent.prompt_len - 1)
        if plan is None or len(flying) > 1:
            settled = flying.pop(0)
            sched.settle(settled, result(settled))
        assert len(flying) < 3
    for plan in flying:
        sched.settle(plan, result(plan))
    assert len(drain(sched)) == 3
