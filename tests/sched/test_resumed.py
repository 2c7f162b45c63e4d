"""Sequences that continue tokens of another engine: scheduled like preempted ones, found in the prefix cache."""

from __future__ import annotations

import pytest

from bankfull.errors import RequestError
from tests.sched.driver import FULL, MEMORY, TOKEN, drain, request, result, scheduler, step

PROMPT = tuple(range(9))


def test_generated_tokens_are_computed_in_the_first_step_and_count_towards_the_limit() -> None:
    sched = scheduler()
    sched.add(request(0, prompt=PROMPT, more=8, generated=((1, 2, 3),)))
    plan = sched.plan()
    assert plan is not None
    [enter], [work] = plan.enter, plan.work
    assert (enter.tokens, enter.prompt_len) == ((*PROMPT, 1, 2, 3), 9)
    assert (work.start, work.count, work.sample) == (0, 12, True)
    tokens = [token for output in sched.settle(plan, result(plan)) for token in output.tokens]
    tokens += [token for _ in range(4) for output in step(sched) for token in output.tokens]
    assert tokens == [TOKEN] * 5 and not sched.unfinished


@pytest.mark.parametrize("specs", [[FULL], [MEMORY], [MEMORY, FULL]], ids=["pages", "recurrent", "hybrid"])
def test_an_engine_that_knows_the_tokens_finds_them_in_its_prefix_cache(specs: list[object]) -> None:
    sched = scheduler(specs)  # type: ignore[arg-type]
    sched.add(request(0, prompt=PROMPT, more=7))
    drain(sched)
    sched.add(request(1, prompt=PROMPT, more=12, generated=((TOKEN,) * 7,)))
    plan = sched.plan()
    assert plan is not None
    # The snapshots of a recurrent state are sparser; pages reach as far as a next turn would.
    assert plan.enter[0].computed == (12 if specs == [FULL] else 8)


def test_cached_tokens_are_counted_within_the_prompt() -> None:
    sched = scheduler()
    for number in range(2):
        sched.add(request(number, prompt=PROMPT, more=12, generated=((TOKEN,) * 7,)))
        assert drain(sched)[number, 0].cached == 9 * number


def test_samples_with_different_tokens_fork_at_the_end_of_the_prompt() -> None:
    sched = scheduler()
    sched.add(request(0, prompt=(*PROMPT, *[1] * 6), more=1))  # so that the cache knows the first sample's tokens, too
    drain(sched)
    sched.add(request(1, prompt=PROMPT, more=12, samples=2, generated=((1,) * 6, (2,) * 6)))
    entered, work = [], []
    for _ in range(2):
        plan = sched.plan()
        assert plan is not None
        entered += plan.enter
        work += [(w.row, w.start, w.count) for w in plan.work]
        sched.settle(plan, result(plan))
    assert [(enter.child, enter.computed, enter.tokens[9:]) for enter in entered] == [
        (0, 8, (1,) * 6),
        (1, 8, (2,) * 6),
    ]
    rows = [enter.row for enter in entered]
    assert work == [(rows[0], 8, 7), (rows[0], 15, 1), (rows[1], 8, 7)]


def test_a_forked_sample_publishes_its_pages_under_its_own_tokens() -> None:
    """The names of the first sample's blocks are known when the second forks: they must not pass to its pages."""
    sched = scheduler()
    prompt = tuple(range(13))
    sched.add(request(0, prompt=prompt, more=1))
    drain(sched)
    sched.add(request(1, prompt=prompt, more=12, samples=2, generated=((1,) * 6, (2,) * 6)))
    plan = sched.plan()
    assert plan is not None and len(sched._running) == 2
    assert len(sched._running[0].chain.names) == 1 + 4, "a block of generated tokens was not named yet"
    sched.abort(1, child=0)
    sched.settle(plan, result(plan))
    drain(sched)
    for number, (token, cached) in enumerate(((1, 12), (2, 16)), 2):
        sched.add(request(number, prompt=(*prompt, *[token] * 6, 3), more=1))
        assert drain(sched)[number, 0].cached == cached


def test_finished_samples_take_no_row() -> None:
    sched = scheduler()
    sched.add(request(0, more=4, samples=3, generated=((1,), (), (2, 3)), finished=frozenset({0})))
    assert sched.waiting == 2
    assert sorted(drain(sched)) == [(0, 1), (0, 2)]


def test_finished_samples_take_no_place_in_the_queue() -> None:
    sched = scheduler(max_waiting=2)
    with pytest.raises(RequestError, match="3 more would exceed max_waiting=2"):
        sched.add(request(0, samples=3))
    sched.add(request(0, samples=3, generated=((1,), (), ()), finished=frozenset({0})))
    assert sched.waiting == 2
