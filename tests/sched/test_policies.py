"""Policies: the order of sequences, and ranks that change while sequences wait and run."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

import pytest

from bankfull.config import SchedConfig, StateConfig
from bankfull.errors import ConfigError
from bankfull.sched.policies.fcfs import FirstCome
from bankfull.sched.policy import BATCH_PRIORITY
from bankfull.sched.sequence import Sequence
from bankfull.scheduling import POLICIES, SchedulingWay
from bankfull.types import StepPlan
from tests.sched.driver import drain, request, scheduler, step
from tests.sim.scenario import scenario_of
from tests.sim.world import World


class LeastServed(FirstCome):
    """The sequence with the fewest generated tokens runs first."""

    def rank(self, sequence: Sequence, now: float) -> float:
        return len(sequence.tokens) - sequence.prompt_len

    def after(self, plan: StepPlan, served: list[Sequence], now: float, seconds: float) -> Iterable[Sequence]:
        return served


@pytest.fixture
def least_served(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(sys.modules, "bankfull.sched.policies.least_served", sys.modules[__name__])
    way = SchedulingWay("fewest generated tokens first", made_by="least_served.LeastServed")
    monkeypatch.setitem(POLICIES, "least-served", way)
    return "least-served"


def entered(policy: str, *priorities: int) -> list[object]:
    """Requests of these priorities, in the order in which a single row admits them."""
    sched = scheduler(rows=1, policy=policy)
    for number, priority in enumerate(priorities):
        sched.add(request(number, more=1, priority=priority))
    found: list[object] = []
    while sched.unfinished:
        found += [output.request for output in step(sched)]
    return found


def test_first_come_first_served_ignores_priority() -> None:
    assert entered("fcfs", 9, 0, BATCH_PRIORITY, -5) == [0, 1, 2, 3]


def test_priority_goes_before_arrival_and_arrival_breaks_ties() -> None:
    assert entered("priority", 1, 0, BATCH_PRIORITY, 1, 0) == [1, 4, 0, 3, 2]


@pytest.mark.parametrize("wrong", [{"policy": "random"}, {"batching": "x"}, {"policy": ["fcfs"]}, {"batching": 3}])
def test_an_unknown_name_is_refused_with_the_known_ones(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"is unknown; use (fcfs, pri|continuous, st)"):
        SchedConfig(**wrong)


def test_no_decoding_sequence_gives_way_to_a_prompt_that_the_step_has_no_tokens_for() -> None:
    """Both rows decode. The first of two urgent prompts fills several steps: the second one waits for it, and the
    decoding sequence keeps its row until then."""
    sched = scheduler(policy="priority", rows=2, step_tokens=8, state=StateConfig(page_tokens=4, prefix_cache=False))
    for number in range(2):
        sched.add(request(number, length=2, more=30, priority=5))
    step(sched)
    sched.add(request(2, length=30, more=2, priority=1))
    sched.add(request(3, length=8, more=2, priority=1))
    running = []
    for _ in range(7):
        step(sched)
        running.append({seq.request.id for seq in sched._running})
    assert running[:4] == [{0, 2}] * 4, "the other one decodes beside the prompt"
    assert {2, 3} in running[4:] and 1 not in running[-1]
    drain(sched)
    assert sched.preemptions == 2


def test_a_rank_that_changes_moves_a_sequence_among_those_that_run(least_served: str) -> None:
    sched = scheduler(policy=least_served)
    sched.add(request(0))
    step(sched)
    sched.add(request(1))
    step(sched)
    assert [seq.request.id for seq in sched._running] == [1, 0]
    drain(sched)


def test_a_rank_that_changes_decides_which_sequence_waits_for_memory(least_served: str) -> None:
    """The older request has more tokens, so the younger one gets the pages that first come, first served denies it."""

    def first_to_end(policy: str) -> object:
        sched = scheduler(frames=6, policy=policy)
        sched.add(request(0, length=4, more=16))
        for _ in range(4):
            step(sched)
        sched.add(request(1, length=4, more=9))
        while sched.unfinished:
            for output in step(sched):
                if output.finish is not None:
                    return output.request
        raise AssertionError("nothing ended")

    assert first_to_end("fcfs") == 0
    assert first_to_end(least_served) == 1


def test_a_rank_that_changes_keeps_every_promise_of_the_simulator(least_served: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(400):
        scenario = scenario_of(seed)
        scenario = replace(scenario, sched=replace(scenario.sched, policy=least_served, batching="continuous"))
        seen.update(asdict(World(scenario).run()))
    assert seen["preemptions"] > 50 and seen["finished"] > 500, seen
