"""Tenants share an engine: what one of them asks for never keeps another from its part."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bankfull.config import StateConfig
from bankfull.sched.policy import BATCH_PRIORITY
from bankfull.sched.scheduler import Scheduler
from bankfull.sched.shares import divide
from tests.sched.driver import FULL, MEMORY, drain, request, result, scheduler, step


def shared(**config: Any) -> Scheduler:
    return scheduler(**{"rows": 4, "step_tokens": 16, "policy": "priority", **config})


def flood(sched: Scheduler, count: int = 12, first: int = 100, **options: Any) -> None:
    for number in range(first, first + count):
        sched.add(request(number, **{"length": 40, "more": 30, "tenant": "greedy", **options}))


def steps_until_first_token(sched: Scheduler, wanted: int, limit: int = 50) -> int:
    for number in range(1, limit + 1):
        if any(output.request == wanted and output.tokens for output in step(sched)):
            return number
    raise AssertionError(f"no token of {wanted} in {limit} steps")


def rows_by_tenant(sched: Scheduler) -> Counter[str]:
    return Counter(seq.tenant for seq in sched._running)


@pytest.mark.parametrize("settled", [1, 3, 7, 40])
@pytest.mark.parametrize("priority", [0, -1000])
def test_a_short_prompt_does_not_wait_behind_another_tenants_long_ones(settled: int, priority: int) -> None:
    sched = shared()
    flood(sched, priority=priority)
    for _ in range(settled):
        step(sched)
    sched.add(request(1, length=6, tenant="modest"))
    assert steps_until_first_token(sched, 1) == 1
    assert rows_by_tenant(sched)["greedy"] >= min(2, settled), "the others keep their part"


def test_among_the_requests_of_one_tenant_priority_decides() -> None:
    sched = shared(rows=1)
    sched.add(request(1, tenant="a"))
    sched.add(request(2, tenant="b", priority=5))
    sched.add(request(3, tenant="b", priority=1))
    order = [output.request for _ in range(40) if sched.unfinished for output in step(sched) if output.finish]
    assert order.index(3) < order.index(2)


def test_rows_are_divided_evenly_without_needless_preemption() -> None:
    sched = shared()
    flood(sched)
    for _ in range(12):
        step(sched)
    assert rows_by_tenant(sched) == {"greedy": 4}
    flood(sched, first=200, tenant="other")
    for _ in range(12):
        step(sched)
    assert rows_by_tenant(sched) == {"greedy": 2, "other": 2}
    before = sched.preemptions
    for _ in range(12):
        step(sched)
    assert rows_by_tenant(sched) == {"greedy": 2, "other": 2} and sched.preemptions == before == 2


def test_a_tenant_that_holds_all_pages_gives_some_back() -> None:
    sched = shared(frames=24, rows=8, state=StateConfig(page_tokens=4, prefix_cache=False))
    sched.add(request(100, length=60, more=30, tenant="greedy"))
    for _ in range(6):
        step(sched)
    assert sched.state.pages.available < 10
    sched.add(request(1, length=30, more=4, tenant="modest"))
    assert steps_until_first_token(sched, 1) <= 5
    last = drain(sched)
    assert len(last) == 2, "the one that gave way ends, too"


def test_a_request_beyond_its_part_waits_and_then_runs() -> None:
    sched = shared(frames=24, state=StateConfig(page_tokens=4, prefix_cache=False))
    sched.add(request(1, length=30, more=10, tenant="a"))
    step(sched)
    sched.add(request(2, length=70, more=10, tenant="b"))
    assert set(drain(sched)) == {(1, 0), (2, 0)} and sched.preemptions == 0


@pytest.mark.parametrize("specs", [[FULL], [MEMORY], [MEMORY, FULL]], ids=["pages", "slots", "both"])
def test_batch_work_of_one_tenant_gives_way_to_online_work_of_another(specs: list[Any]) -> None:
    sched = shared(specs=specs, slots=40)
    flood(sched, priority=BATCH_PRIORITY)
    for _ in range(5):
        step(sched)
    sched.add(request(1, length=6, tenant="modest"))
    assert steps_until_first_token(sched, 1) <= 2


def test_batches_of_two_tenants_share_what_is_left() -> None:
    sched = shared()
    flood(sched, priority=BATCH_PRIORITY)
    flood(sched, first=200, tenant="other", priority=BATCH_PRIORITY)
    seen: Counter[str] = Counter()
    for _ in range(60):
        plan = sched.plan()
        assert plan is not None
        by_row = {seq.row: seq.tenant for seq in sched._running}
        for work in plan.work:
            seen[by_row[work.row]] += work.count
        sched.settle(plan, result(plan))
    assert 0.7 < seen["greedy"] / seen["other"] < 1.4


def test_one_tenant_is_served_as_if_there_were_none() -> None:
    def plans(tenant: str) -> list[Any]:
        sched = shared(frames=30)
        for number in range(9):
            sched.add(request(number, length=3 + 5 * number, priority=number % 3, tenant=tenant))
        made = []
        while sched.unfinished:
            plan = sched.plan()
            assert plan is not None
            made.append(plan.work)
            sched.settle(plan, result(plan))
        return made

    assert plans("") == plans("somebody")


@given(
    wants=st.dictionaries(st.text("abcdef", min_size=1, max_size=2), st.integers(1, 200), max_size=8),
    turns=st.dictionaries(st.text("abcdef", min_size=1, max_size=2), st.integers(0, 50)),
    tokens=st.integers(0, 300),
)
def test_parts_are_max_min_fair(wants: dict[str, int], turns: dict[str, int], tokens: int) -> None:
    parts = divide(tokens, wants, turns)
    assert set(parts) == set(wants)
    assert all(0 <= parts[tenant] <= wants[tenant] for tenant in wants)
    assert sum(parts.values()) == min(tokens, sum(wants.values())), "nothing is left idle, nothing given twice"
    largest = max(parts.values(), default=0)
    for tenant, part in parts.items():
        if part < wants[tenant]:
            assert part >= largest - 1, "a tenant that gets less than it wants has less than another"


@given(count=st.integers(2, 12), tokens=st.integers(1, 5))
def test_where_tokens_are_fewer_than_tenants_everybody_gets_a_turn(count: int, tokens: int) -> None:
    wants = {f"tenant {number}": 100 for number in range(count)}
    turns: dict[str, int] = {}
    for now in range(count):
        for tenant, part in divide(tokens, wants, turns).items():
            if part:
                turns[tenant] = now
    assert set(turns) == set(wants)
