"""A slow machine gets smaller chunks: a step with decodes is bounded, and a prompt alone is hardly cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from bankfull.config import SchedConfig, StateConfig
from bankfull.decode.plain import Plain
from bankfull.engine import Engine
from bankfull.errors import ConfigError
from bankfull.plan.fake_runner import Clock, FakeRunner
from bankfull.sched.pace import ALONE, FIRST_TOKENS, LEAST_TOKENS, SHARED, Pace
from bankfull.sched.policy import BATCH_PRIORITY
from bankfull.sched.scheduler import Scheduler
from bankfull.sched.shares import ALTERNATION_SECONDS
from bankfull.state.manager import StateManager
from bankfull.state.spec import layout_of
from bankfull.types import Request, StepPlan, Work
from tests.sched.driver import FULL

BOUND = 0.25


@dataclass
class Machine:
    """The engine's own loop on a device of a given speed. `scored`: times as long for each token with scores."""

    step: float
    token: float
    scored: float = 3.0
    depth: int = 0
    config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        options = {"rows": 8, "step_tokens": 512, "step_ms": 1e3 * BOUND, "policy": "priority"} | self.config
        sched = SchedConfig(**options)
        state = StateConfig(prefix_cache=False)
        self.clock = Clock()
        manager = StateManager(layout_of([(FULL,)], 16), 2000, 10, state)
        self.scheduler = Scheduler(sched, manager, clock=self.clock)
        runner = FakeRunner(self.clock, self.seconds)
        self.engine = Engine(self.scheduler, runner, Plain(), self.depth, clock=self.clock)
        self.engine.on_launch.append(self._note)
        self.steps: list[tuple[int, int, float]] = []
        """Sequences that decoded, tokens of prompts, and seconds, of each step."""
        self._scored: set[int] = set()

    def seconds(self, work: Sequence[Work]) -> float:
        return self.step + sum(
            w.count * self.token * (self.scored if w.row in self._scored and w.count > 1 else 1.0) for w in work
        )

    def add(self, number: int, prompt: int, answer: int, **how: Any) -> None:
        tokens = tuple(range(number * 100_000, number * 100_000 + prompt))
        self.engine.add(Request(number, tokens, prompt + answer, **how))

    def _note(self, plan: StepPlan) -> None:
        for enter in plan.enter:
            scored = self.scheduler._by_request[enter.request][0].request.scored
            (self._scored.add if scored else self._scored.discard)(enter.row)
        prompts = sum(w.count for w in plan.work if w.count > 1)
        self.steps.append((sum(w.count == 1 for w in plan.work), prompts, self.seconds(plan.work)))

    def run(self, steps: int | None = None) -> None:
        while self.engine.busy and steps != 0:
            self.engine.step()
            steps = None if steps is None else steps - 1

    def mixed(self, first: int = 0) -> list[tuple[int, int, float]]:
        """Steps with decodes beside a prompt."""
        return [step for step in self.steps[first:] if step[0] and step[1]]


SPEEDS = [(0.02, 0.0064), (0.001, 0.0001), (0.2, 0.03), (0.05, 0.001)]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("step", "token"), SPEEDS)
def test_a_step_with_decodes_is_bounded(step: float, token: float, depth: int) -> None:
    machine = Machine(step, token, depth=depth)
    machine.add(1, 100, 2000)
    machine.run(20)
    begun = len(machine.steps)
    machine.add(2, 8000, 5)
    machine.run(1200)
    mixed = machine.mixed(begun)
    assert mixed and sum(prompts for _, prompts, _ in mixed) >= 8000 - 1
    for decoding, prompts, seconds in mixed:
        assert decoding == 1 and (seconds <= 1.02 * BOUND or prompts <= LEAST_TOKENS)
    # Nor is it cut more than that asks for, once chunks were timed: nearly all of the time is used, or of the budget.
    assert all(seconds + 2 * LEAST_TOKENS * token >= BOUND or prompts >= 511 for _, prompts, seconds in mixed[9:-1])


def test_a_prompt_alone_is_cut_to_four_times_as_much() -> None:
    machine = Machine(0.02, 0.0064)
    machine.add(1, 100, 5)
    machine.run()
    begun = len(machine.steps)
    machine.add(2, 1500, 5)
    machine.run()
    chunks = [(prompts, seconds) for _, prompts, seconds in machine.steps[begun:] if prompts]
    assert all(BOUND < seconds <= 1.02 * ALONE * BOUND for _, seconds in chunks[:-1])
    # Where another tenant's request may arrive meanwhile, it waits for two steps: this one, and its own.
    shared = SHARED * BOUND
    for number, tenant, seconds in ((3, "a", shared), (4, "b", shared), (5, "b", shared), (6, "b", ALONE * BOUND)):
        if number == 6:
            machine.clock.now += ALTERNATION_SECONDS
        begun = len(machine.steps)
        machine.add(number, 1500, 5, tenant=tenant)
        machine.run()
        chunks = [(prompts, seconds) for _, prompts, seconds in machine.steps[begun:] if prompts]
        longest = max(each for _, each in chunks)
        assert seconds - LEAST_TOKENS * 0.0064 < longest <= 1.1 * seconds  # short steps time a token less well
    fast = Machine(0.001, 0.0001)
    fast.add(1, 1500, 5)
    fast.run()
    assert [prompts for _, prompts, _ in fast.steps if prompts] == [512, 512, 476]


def test_without_a_bound_only_tokens_cut() -> None:
    machine = Machine(0.02, 0.0064, config={"step_ms": 0.0})
    machine.add(1, 100, 2000)
    machine.run(20)
    machine.add(2, 1500, 5)
    machine.run(10)
    assert [prompts for _, prompts, _ in machine.mixed()] == [511, 511, 478]


def test_before_any_prompt_was_timed_it_is_cut_short_beside_decodes() -> None:
    pace = Pace(BOUND)
    room = pace.room(1, awaited=True)
    assert room is not None and room.tokens(False) == room.tokens(True) == FIRST_TOKENS
    room.take(FIRST_TOKENS, False)
    assert room.tokens(False) == 0
    assert pace.room(0, awaited=False) is None and Pace(0.0).room(5, awaited=True) is None


def test_a_machine_that_becomes_slow_is_believed_at_once_and_a_single_pause_is_soon_forgotten() -> None:
    machine = Machine(0.01, 0.0005)
    machine.add(1, 100, 5000)
    machine.run(20)
    machine.add(2, 3000, 5)
    machine.run(3)
    machine.token = 0.01  # from here on it is twenty times slower
    begun = len(machine.steps)
    machine.run(60)
    slow = machine.mixed(begun)
    assert slow[0][2] > BOUND and all(seconds <= 1.05 * BOUND for _, _, seconds in slow[1:])
    pace = Pace(BOUND)
    pace.observe(1, 0, 0, 0.01)
    for _ in range(8):
        pace.observe(1, 400, 0, 0.21)
    pace.observe(1, 400, 0, 5.0)
    assert pace.room(1, awaited=True).tokens(False) < 40  # type: ignore[union-attr]
    for _ in range(8):
        pace.observe(1, 16, 0, 0.018)
    assert pace.room(1, awaited=True).tokens(False) == 480  # type: ignore[union-attr]


@pytest.mark.parametrize("known", [False, True])
def test_tokens_whose_scores_are_asked_for_have_a_rate_of_their_own(known: bool) -> None:
    machine = Machine(0.01, 0.001, scored=6.0)
    machine.add(1, 100, 5000)
    machine.run(20)
    if known:
        machine.add(2, 400, 1, scored=True, generates=False)
        machine.run(30)
    begun = len(machine.steps)
    machine.add(3, 1000, 1, scored=True, generates=False)
    machine.run(100)
    mixed = machine.mixed(begun)
    assert all(seconds <= 1.05 * BOUND for _, _, seconds in (mixed if known else mixed[1:]))
    assert mixed[0][2] <= 2 * BOUND, "before they are known, they are thought to be slow"
    # A plain prompt afterwards is not held to be as slow.
    begun = len(machine.steps)
    machine.add(4, 600, 1)
    machine.run(20)
    assert max(prompts for _, prompts, _ in machine.mixed(begun)) > 150


def test_batch_work_is_not_waited_for_but_does_not_hold_up_who_is() -> None:
    machine = Machine(0.02, 0.002)
    machine.add(1, 100, 300, priority=BATCH_PRIORITY)
    machine.run(5)
    machine.add(2, 400, 5, priority=BATCH_PRIORITY)
    machine.add(3, 50, 200)
    machine.run(100)
    assert all(seconds <= 1.02 * BOUND for decoding, _, seconds in machine.mixed() if decoding)


def test_a_prompt_always_goes_on() -> None:
    """Even where decodes alone take longer than the bound."""
    machine = Machine(1.0, 0.5)
    machine.add(1, 10, 3000)
    machine.run(5)
    machine.add(2, 200, 1)
    machine.run(200 // LEAST_TOKENS + 3)
    assert sum(prompts for _, prompts, _ in machine.mixed()) >= 199
    assert {prompts for _, prompts, _ in machine.mixed()} <= {LEAST_TOKENS, 200 % LEAST_TOKENS or LEAST_TOKENS}


@pytest.mark.parametrize("milliseconds", [-1.0, float("inf"), float("nan")])
def test_a_bound_that_is_no_time_is_refused(milliseconds: float) -> None:
    with pytest.raises(ConfigError, match="step_ms"):
        SchedConfig(step_ms=milliseconds)


@pytest.mark.parametrize("token", [0.002, 0.5])
def test_tenants_share_what_a_step_has_time_for(token: float) -> None:
    machine = Machine(0.02, token)
    machine.add(1, 30, 5000)
    machine.run(10)
    machine.add(2, 4000, 1, tenant="greedy")
    machine.run(2)
    machine.add(3, 64, 1, tenant="modest")
    done = 0
    while machine.scheduler._by_request.get(3) and done < 200:
        machine.run(1)
        done += 1
    room = max(LEAST_TOKENS, int(0.23 / token))
    assert done <= 2 * 64 / room + 4, "the one that came first has taken all of the time"
    assert machine.scheduler._by_request[2], "and it goes on"


def test_a_prompt_token_is_never_free_however_long_the_decodes_seemed() -> None:
    pace = Pace(BOUND)
    for _ in range(8):
        pace.observe(8, 0, 0, 0.06)
    assert pace.decode_seconds(48) > 0.3
    for _ in range(8):
        pace.observe(48, 8, 0, 0.18)  # less than the decodes alone were predicted to take
    for _ in range(8):
        pace.observe(48, 0, 0, 0.16)
    room = pace.room(48, awaited=True)
    assert room is not None and 16 <= room.tokens(False) <= 80


def test_many_decodes_of_one_tenant_leave_room_for_the_prompt_of_another() -> None:
    pace = Pace(BOUND)
    pace.observe(1, 512, 0, 0.512)
    pace.observe(64, 0, 0, BOUND)
    alone, shared = (pace.room(64, awaited=True, shared=each) for each in (False, True))
    assert alone is not None and alone.tokens(False) == LEAST_TOKENS
    assert shared is not None and shared.tokens(False) > 4 * LEAST_TOKENS
