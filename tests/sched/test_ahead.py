"""KV slots for a proposer: reserved after a step's tokens where memory allows, and never at another's cost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bankfull.config import SchedConfig, StateConfig
from bankfull.sched.scheduler import Scheduler
from bankfull.state.manager import StateManager
from bankfull.state.spec import layout_of
from tests.sched.driver import FULL, Clock, request, result

PAGE = 4


def scheduler(ahead: int, frames: int, **config: int) -> Scheduler:
    state = StateConfig(page_tokens=PAGE)
    manager = StateManager(layout_of([(FULL,)], PAGE), frames, 0, state)
    return Scheduler(SchedConfig(**config), manager, Clock(), ahead)


def covered(sched: Scheduler, row: int) -> int:
    """Tokens that the sequence in the row has pages for."""
    return next(PAGE * len(seq.state.tables[0]) for seq in sched._running if seq.row == row and seq.state is not None)


@given(st.integers(0, 9), st.integers(0, 5), st.lists(st.integers(1, 11), min_size=1, max_size=3), st.integers(1, 20))
def test_rows_that_sample_get_slots_ahead_up_to_their_limit(
    ahead: int, drafts: int, lengths: list[int], more: int
) -> None:
    sched = scheduler(ahead, 200, rows=4, step_tokens=16)
    for i, length in enumerate(lengths):
        sched.add(request(i, length, more))
    while sched.unfinished:
        plan = sched.plan(drafts)
        assert plan is not None
        for work in plan.work:
            end = work.start + work.count + work.drafts
            most = next(s.request.limit for s in sched._running if s.row == work.row)
            assert covered(sched, work.row) >= (min(end + ahead, most) if work.sample else end)
            assert covered(sched, work.row) <= -(-most // PAGE) * PAGE, "no page beyond the end of a sequence"
        sched.settle(plan, result(plan))
    assert sched.state.pages.census().held == 0


@given(st.integers(1, 9), st.integers(0, 3))
def test_too_few_pages_leave_out_what_lies_ahead(ahead: int, drafts: int) -> None:
    """The pages suffice for one sequence to its end and not for more: it is never stopped by slots ahead."""
    sched = scheduler(ahead, 6, rows=2, step_tokens=16)
    sched.add(request(0, 8, 16))
    while sched.unfinished:
        plan = sched.plan(drafts)
        assert plan is not None and plan.work
        sched.settle(plan, result(plan))
    assert sched.preemptions == 0
