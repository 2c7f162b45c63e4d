"""Multi-level feedback queues where memory is short: queues change, and every sequence still gets its tokens."""

from __future__ import annotations

from collections import deque

import pytest

from bankfull.config import StateConfig
from bankfull.types import StepPlan
from tests.sched.driver import MEMORY, Clock, request, result, scheduler

STEP_SECONDS = 1.0


@pytest.mark.parametrize("policy", ["mlfq", "skip-join-mlfq"])
@pytest.mark.parametrize("quantum_ms", [500.0, 1500.0, 2500.0])
@pytest.mark.parametrize("starvation", [0.5, 2.5])
def test_sequences_that_preempt_each_other_for_memory_get_their_tokens(
    policy: str, quantum_ms: float, starvation: float
) -> None:
    """Three slots hold one sequence with two steps in flight; a second one is admitted, and is in its way. Quanta and
    promotion change the order of the queues before a prompt is computed, and nothing that was computed is cached."""
    clock = Clock()
    sched = scheduler(
        [MEMORY],
        slots=3,
        clock=clock,
        state=StateConfig(page_tokens=4, prefix_cache=False),
        rows=2,
        step_tokens=4,
        prefill_tokens=1,
        policy=policy,
        quantum_ms=quantum_ms,
        starvation=starvation,
    )
    for number in range(3):
        sched.add(request(number, length=5, more=2))
    flying: deque[StepPlan] = deque()
    for _ in range(300):
        if not sched.unfinished:
            break
        if (plan := sched.plan()) is not None:
            flying.append(plan)
        if plan is None or len(flying) > 1:
            settled = flying.popleft()
            sched.took(settled, STEP_SECONDS)
            sched.settle(settled, result(settled))
        clock.now += STEP_SECONDS
    assert not sched.unfinished, [(seq.request.id, seq.fruitless) for seq in (*sched._running, *sched._waiting)]
    assert sched.preemptions
