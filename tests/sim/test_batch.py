"""Batch work fills what online work leaves, and hardly delays it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from statistics import median

import pytest

from bankfull.config import SchedConfig, StateConfig
from bankfull.sched.policy import BATCH_PRIORITY
from bankfull.sched.scheduler import Scheduler
from bankfull.state.manager import StateManager
from bankfull.state.spec import Paged, TensorSpec, layout_of
from bankfull.types import Request, StepPlan, StepResult

STEP_SECONDS = 0.008
TOKEN_SECONDS = 0.0002
"""A small model on a small machine: weights are read once per step, arithmetic is paid per token."""
ONLINE_PROMPT, ONLINE_OUTPUT = 256, 40


@dataclass
class Traffic:
    """A saturating batch, some online requests, and a clock that runs with the tokens of each step."""

    with_batch: bool
    online_every: float | None
    seconds: float = 120.0
    now: float = 0.0
    first: dict[int, float] = field(default_factory=dict)
    arrived: dict[int, float] = field(default_factory=dict)
    batch_tokens: int = 0

    def __post_init__(self) -> None:
        state = StateConfig(page_tokens=16)
        layout = layout_of([(Paged((TensorSpec("k", (1, 4), "float32"),)),)], state.page_tokens)
        config = SchedConfig(rows=64, step_tokens=512, policy="priority")
        self.sched = Scheduler(config, StateManager(layout, 64 * 24, 0, state), lambda: self.now)
        self.random = Random(5)
        self.batch: set[int] = set()
        self.number = 0

    def add(self, prompt_len: int, output: int, priority: int) -> int:
        self.number += 1
        prompt = tuple(self.random.randrange(1 << 20) for _ in range(prompt_len))
        self.sched.add(Request(self.number, prompt, prompt_len + output, priority=priority))
        return self.number

    def run(self) -> Traffic:
        coming = self._pause()
        while self.now < self.seconds:
            while self.now >= coming:
                self.arrived[self.add(ONLINE_PROMPT, ONLINE_OUTPUT, 0)] = coming
                coming += self._pause()
            while self.with_batch and len(self.batch) < 100:
                self.batch.add(self.add(self.random.randint(50, 300), self.random.randint(20, 100), BATCH_PRIORITY))
            plan = self.sched.plan()
            if plan is None:
                self.now = coming
                continue
            self.now += STEP_SECONDS + plan.tokens * TOKEN_SECONDS
            self._settle(plan)
        return self

    def _pause(self) -> float:
        return self.random.expovariate(1 / self.online_every) if self.online_every else float("inf")

    def _settle(self, plan: StepPlan) -> None:
        result = StepResult(plan.step, [[7] if work.sample else [] for work in plan.work])
        for output in self.sched.settle(plan, result):
            if output.request in self.batch:
                self.batch_tokens += len(output.tokens)
                if output.finish:
                    self.batch.discard(output.request)  # type: ignore[arg-type]
            else:
                self.first.setdefault(output.request, self.now)  # type: ignore[arg-type]

    @property
    def ttft(self) -> float:
        assert len(self.first) > 20, "too few to tell"
        return median(when - self.arrived[request] for request, when in self.first.items())


@pytest.fixture(scope="module")
def busy() -> Traffic:
    return Traffic(with_batch=True, online_every=2.0).run()


def test_an_online_request_hardly_feels_a_saturating_batch(busy: Traffic) -> None:
    idle = Traffic(with_batch=False, online_every=2.0).run()
    assert busy.batch_tokens > 1000
    assert busy.ttft < 1.5 * idle.ttft


def test_a_batch_keeps_most_of_its_pace_beside_light_online_load(busy: Traffic) -> None:
    alone = Traffic(with_batch=True, online_every=None).run()
    assert busy.batch_tokens > 0.7 * alone.batch_tokens


def test_every_row_of_a_batch_gets_its_turn_beside_online_work() -> None:
    world = Traffic(with_batch=True, online_every=None)
    world.sched._company = 10**9  # online work arrived just now, at every step
    turns: dict[object, list[int]] = {}
    for number in range(400):
        while len(world.batch) < 100:
            world.batch.add(world.add(50, 100, BATCH_PRIORITY))
        plan = world.sched.plan()
        assert plan is not None and plan.tokens <= 64 and sum(work.count == 1 for work in plan.work) <= 32 + 1
        by_row = {seq.row: seq for seq in world.sched._running}
        for work in plan.work:
            if work.start >= by_row[work.row].prompt_len:
                turns.setdefault(by_row[work.row].request.id, []).append(number)
        world._settle(plan)
    assert len(turns) > 64
    waits = [after - before for steps in turns.values() for before, after in pairwise(steps)]
    assert max(waits) <= 4


def test_short_steps_cost_the_batch_little(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Traffic(with_batch=True, online_every=None).run()
    monkeypatch.setattr("bankfull.sched.scheduler.batch_share", lambda tokens, decoding, company: (decoding, tokens))
    assert alone.batch_tokens > 0.85 * Traffic(with_batch=True, online_every=None).run().batch_tokens
