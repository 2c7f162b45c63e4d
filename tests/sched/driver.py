"""A scheduler at loop depth 0, driven by hand: every sampled token is the same, and every draft is accepted."""

from __future__ import annotations

from typing import Any

from bankfull.config import SchedConfig, StateConfig
from bankfull.sched.scheduler import Scheduler
from bankfull.state.manager import StateManager
from bankfull.state.spec import Paged, Recurrent, StateSpec, TensorSpec, layout_of
from bankfull.types import Output, Request, StepPlan, StepResult

TOKEN = 7
FULL = Paged((TensorSpec("k", (1, 4), "float32"), TensorSpec("v", (1, 4), "float32")))
MEMORY = Recurrent((TensorSpec("h", (4,), "float32"),))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def scheduler(
    specs: list[StateSpec] | None = None,
    frames: int = 100,
    slots: int = 100,
    clock: Clock | None = None,
    state: StateConfig | None = None,
    **config: Any,
) -> Scheduler:
    state = state if state is not None else StateConfig(page_tokens=4)
    layout = layout_of([(spec,) for spec in specs or [FULL]], state.page_tokens)
    return Scheduler(SchedConfig(**config), StateManager(layout, frames, slots, state), clock or Clock())


def request(id: int, length: int = 5, more: int = 5, **options: Any) -> Request:
    prompt = options.pop("prompt", tuple(range(100 * id, 100 * id + length)))
    return Request(id=id, prompt=prompt, limit=len(prompt) + more, **options)


def result(plan: StepPlan, token: int = TOKEN) -> StepResult:
    tokens = [[token] * (1 + work.drafts) if work.sample else [] for work in plan.work]
    return StepResult(plan.step, tokens, completed=[transfer.id for transfer in plan.transfers])


def step(sched: Scheduler, drafts: int = 0) -> list[Output]:
    plan = sched.plan(drafts)
    assert plan is not None, "nothing to run"
    return sched.settle(plan, result(plan))


def drain(sched: Scheduler) -> dict[tuple[Any, int], Output]:
    """Run to the end; the last output of each sequence."""
    last: dict[tuple[Any, int], Output] = {}
    for _ in range(1000):
        if not sched.unfinished:
            return last
        for output in step(sched):
            last[output.request, output.child] = output
    raise AssertionError("does not end")
