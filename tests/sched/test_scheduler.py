from __future__ import annotations

import pytest

from bankfull.config import StateConfig
from bankfull.sched.gates import WaitingQueue
from bankfull.state.spec import Paged, StateSpec, TensorSpec
from bankfull.types import StepResult
from tests.sched.driver import FULL, MEMORY, TOKEN, drain, request, result, scheduler, step

WINDOW = Paged(FULL.tensors, window=6)
LIGHT = Paged((TensorSpec("k", (1, 2), "float32"),), window=9)
"""A quarter of the weight of FULL: its pages are four times as long."""


@pytest.mark.parametrize(
    ("specs", "border"),
    [([FULL], 4), ([WINDOW], 4), ([FULL, LIGHT], 16), ([MEMORY], 4), ([MEMORY, FULL], 4), ([MEMORY, FULL, LIGHT], 16)],
    ids=["full", "window", "unequal pages", "recurrent", "hybrid", "hybrid with unequal pages"],
)
@pytest.mark.parametrize("length", [4, 5, 16, 17, 30, 33])
def test_the_second_of_two_equal_prompts_starts_at_the_last_border_before_its_last_token(
    specs: list[StateSpec], border: int, length: int
) -> None:
    sched = scheduler(specs)
    prompt = tuple(range(length))
    for number in range(2):
        sched.add(request(number, prompt=prompt))
        cached = drain(sched)[number, 0].cached
        assert cached == (0 if number == 0 else (length - 1) // border * border)


def test_the_next_turn_of_a_conversation_starts_where_the_last_one_ended() -> None:
    sched = scheduler()
    sched.add(request(0, length=6, more=7))
    drain(sched)
    turn = (*request(0, length=6).prompt, *[TOKEN] * 7, 1, 2, 3)
    sched.add(request(1, prompt=turn))
    assert drain(sched)[1, 0].cached == 12


@pytest.mark.parametrize("cache", [True, False])
def test_the_blocks_of_a_new_prompt_are_named_while_the_device_works(cache: bool) -> None:
    sched = scheduler(state=StateConfig(page_tokens=4, prefix_cache=cache), step_tokens=30)
    sched.add(request(0, length=41))
    named = []
    for _ in range(2):
        plan = sched.plan()
        assert plan is not None
        [seq] = sched._running
        named.append(len(seq.chain.names) - 1)
        sched.name_ahead()
        named.append(len(seq.chain.names) - 1)
        sched.settle(plan, result(plan))
        assert len(seq.chain.names) - 1 == named[-1]
    assert named == ([2, 7, 7, 10] if cache else [0] * 4)


def test_names_are_wanted_only_of_what_still_runs() -> None:
    sched = scheduler()
    sched.add(request(0, length=41))
    plan = sched.plan()
    assert plan is not None
    sched.abort(0)
    sched.name_ahead()
    assert sched.settle(plan, result(plan)) == []


@pytest.mark.parametrize("reason", ["salt", "reuse", "cache off"])
def test_nothing_is_reused_where_it_must_not_be(reason: str) -> None:
    sched = scheduler(state=StateConfig(page_tokens=4, prefix_cache=reason != "cache off"))
    sched.add(request(0, length=20))
    drain(sched)
    options = {"salt": b"tenant"} if reason == "salt" else {"reuse": reason != "reuse"}
    sched.add(request(1, prompt=request(0, length=20).prompt, **options))
    assert drain(sched)[1, 0].cached == 0


def test_siblings_share_full_pages_and_copy_the_partial_one() -> None:
    sched = scheduler()
    sched.add(request(0, length=7, samples=3))
    step(sched)
    plan = sched.plan()
    assert plan is not None
    assert len(plan.enter) == 2 and len(plan.transfers) == 2
    assert len({transfer.src for transfer in plan.transfers}) == 1
    first = {edit.pages[0] for edit in plan.pages if edit.first == 0}
    assert len(first) == 1, "the full page is one and the same"
    sched.settle(plan, result(plan))
    assert len(drain(sched)) == 3


def test_siblings_without_a_row_wait_for_one_and_compute_the_prompt_once_more_at_most() -> None:
    sched = scheduler(rows=2, state=StateConfig(page_tokens=4, prefix_cache=False))
    sched.add(request(0, length=7, samples=5))
    assert len(drain(sched)) == 5


def test_when_the_first_sample_is_aborted_its_siblings_go_on() -> None:
    sched = scheduler()
    sched.add(request(0, length=7, samples=3))
    step(sched)
    assert [output.child for output in sched.abort(0, child=0)] == [0]
    assert set(drain(sched)) == {(0, 1), (0, 2)}


def test_drafts_take_no_budget_that_a_decode_needs() -> None:
    sched = scheduler(step_tokens=5)
    for i in range(4):
        sched.add(request(i, length=1, more=20))
    step(sched)
    plan = sched.plan(3)
    assert plan is not None
    assert len(plan.work) == 4 and plan.tokens == 5


def test_drafts_never_pass_the_limit() -> None:
    sched = scheduler()
    sched.add(request(0, length=1, more=4))
    step(sched)
    plan = sched.plan(9)
    assert plan is not None and plan.work[0].drafts == 2
    (output,) = sched.settle(plan, result(plan))
    assert len(output.tokens) == 3 and output.finish == "length"


def test_drafts_are_dropped_before_a_sequence_is_preempted_for_them() -> None:
    sched = scheduler([MEMORY], slots=4)
    sched.add(request(0, length=1, more=9))
    sched.add(request(1, length=1, more=9))
    step(sched)
    plan = sched.plan(3)
    assert plan is not None
    assert [work.drafts for work in plan.work] == [0, 0] and sched.preemptions == 0


def test_the_snapshot_at_an_end_inside_drafts_is_the_state_at_that_end() -> None:
    """Three drafts are accepted, the first of them is a stop token that falls on a page border."""
    sched = scheduler([MEMORY], state=StateConfig(page_tokens=4, snapshot_every=1))
    stop = 1
    sched.add(request(0, prompt=(5, 5), more=20, stop_ids=frozenset({stop})))
    step(sched)
    plan = sched.plan(3)
    assert plan is not None
    work = plan.work[0]
    (output,) = sched.settle(plan, StepResult(plan.step, [[stop, 8, 9, 8]]))
    assert output.tokens == [stop] and output.finish == "stop"
    sched.add(request(1, prompt=(5, 5, TOKEN, stop, 3)))
    plan = sched.plan()
    assert plan is not None
    assert plan.enter[0].computed == 4 and plan.enter[0].slot == work.slots[1]


def test_priority_takes_the_row_of_a_running_sequence_that_has_less() -> None:
    sched = scheduler(rows=2, policy="priority")
    sched.add(request(0, priority=1, more=50))
    sched.add(request(1, priority=2, more=50))
    step(sched)
    sched.add(request(2, priority=0))
    plan = sched.plan()
    assert plan is not None
    assert [enter.tokens[0] for enter in plan.enter] == [200] and sched.preemptions == 1
    sched.settle(plan, result(plan))
    assert len(drain(sched)) == 3


def test_priority_takes_the_pages_of_as_few_running_sequences_as_it_needs() -> None:
    sched = scheduler(frames=16, policy="priority")
    for i in range(4):
        sched.add(request(i, length=9, more=4, priority=1))
    step(sched)
    assert sched.running == 4
    sched.add(request(4, length=12, more=4))
    step(sched)
    assert sched.preemptions == 1


def test_no_sequence_is_preempted_when_that_would_not_free_enough_memory() -> None:
    sched = scheduler(frames=12, policy="priority")
    sched.add(request(0, length=32, more=8, priority=0))
    sched.add(request(1, length=2, more=8, priority=2))
    step(sched)
    sched.add(request(2, length=20, more=8, priority=1))
    step(sched)
    assert sched.preemptions == 0 and sched.running == 2


def test_pages_in_quarantine_are_waited_for_before_another_sequence_is_preempted() -> None:
    sched = scheduler(frames=16, policy="priority")
    for i in range(4):
        sched.add(request(i, length=9, more=4, priority=1))
    step(sched)
    flying = sched.plan()
    assert flying is not None
    sched.add(request(4, length=12, more=4))
    plan = sched.plan()
    assert plan is not None and not plan.enter, "the victim's pages are still in use"
    assert sched.preemptions == 1
    for settled in (flying, plan):
        sched.settle(settled, result(settled))
    plan = sched.plan()
    assert plan is not None and [enter.tokens[0] for enter in plan.enter] == [400]
    assert sched.preemptions == 1


def test_first_come_first_served_never_preempts_for_a_newcomer() -> None:
    sched = scheduler(rows=1)
    sched.add(request(0, priority=9))
    step(sched)
    sched.add(request(1, priority=0))
    step(sched)
    assert sched.preemptions == 0 and sched.waiting == 1


def test_memory_pressure_preempts_the_last_and_its_output_goes_on() -> None:
    sched = scheduler(frames=6)
    sched.add(request(0, length=3, more=18))
    sched.add(request(1, length=3, more=18))
    seen: dict[int, list[int]] = {0: [], 1: []}
    while sched.unfinished:
        for output in step(sched):
            seen[output.request].extend(output.tokens)  # type: ignore[index]
    assert sched.preemptions >= 1
    assert [len(tokens) for tokens in seen.values()] == [18, 18]


def test_an_error_ends_only_its_own_request() -> None:
    sched = scheduler()
    sched.add(request(0))
    sched.add(request(1))
    plan = sched.plan()
    assert plan is not None
    outcome = result(plan)
    outcome.errors[0] = "no"
    outputs = sched.settle(plan, outcome)
    assert [(output.finish, output.error) for output in outputs] == [("error", "no"), (None, None)]
    assert set(drain(sched)) == {(1, 0)}


def test_a_long_queue_costs_a_step_nothing() -> None:
    """Work per step must not grow with the number of requests that wait."""
    sched = scheduler(rows=1, frames=1000)
    for i in range(300):
        sched.add(request(i, more=90))
    step(sched)
    looked_at = 0

    class Counted(WaitingQueue):
        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            nonlocal looked_at
            looked_at += 1
            return super().__getitem__(index)

        def __iter__(self):  # type: ignore[no-untyped-def]
            nonlocal looked_at
            looked_at += len(self)
            return super().__iter__()

    sched._waiting.__class__ = Counted
    for _ in range(10):
        step(sched)
    assert looked_at <= 20


def test_sequences_of_a_model_without_pages_run_together() -> None:
    sched = scheduler([MEMORY], frames=0, rows=4)  # no pages at all, as `plan_memory` gives a purely recurrent model
    for number in range(3):
        sched.add(request(number))
    plan = sched.plan()
    assert plan is not None and len(plan.work) == 3
