"""The same jobs on an engine that computes, with the time of every step recorded."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

from bankfull.config import SchedConfig
from bankfull.engine import Engine
from bankfull.plan.policies.jobs import JobTraffic, TrafficJob
from bankfull.plan.policies.simulator import PAGE_TOKENS, Advance, JobRun, swapped_bytes
from bankfull.plan.policies.step_model import StepRecord
from bankfull.plan.simulate import RequestTimes
from bankfull.plan.step_timer import GREEDY
from bankfull.runtime.rows import Job
from bankfull.state.manager import StateManager
from bankfull.types import Request, StepPlan

LONGEST_SLEEP = 0.01


def scheduled(engine: Engine[Any], sched: SchedConfig, clock: Callable[[], float] = time.monotonic) -> Engine[Any]:
    """An engine with another scheduler over the model, the rows and the state of an idle one. The cache is emptied."""
    engine.scheduler.state.forget(everywhere=True)
    scheduler = engine.scheduler.successor(sched, clock)
    return Engine(scheduler, engine.runner, engine.strategy, engine.depth, clock=clock)


def memory_tokens(state: StateManager, traffic: JobTraffic) -> int:
    """Tokens whose state fits into the pages of an engine that can run the traffic; 0 if it has no pages."""
    each = sum(1 / group.page_tokens for group in state.layout.paged)
    return max(int(state.pages.size / each), traffic.most_tokens + PAGE_TOKENS) if each else 0


def measure(
    engine: Engine[Any],
    jobs: Sequence[TrafficJob],
    traffic: JobTraffic,
    vocab: int,
    advance: Advance = lambda done, note: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[JobRun, list[StepRecord]]:
    """Submit each job at its time, whether or not the engine keeps up. `clock`: the engine's own."""
    run, records = JobRun([RequestTimes(job.time, job.prompt, job.output) for job in jobs], 0.0, 0, 0, 0), []
    planned: list[StepPlan] = []
    engine.on_launch.append(planned.append)
    swapped = swapped_bytes(engine.scheduler.state)
    coming, scheduler = deque(jobs), engine.scheduler
    begun = ended_at = clock()
    while coming or scheduler.unfinished:
        now = clock() - begun
        # A step lasts from the end of the one before it, so that its time includes that of the loop around it.
        before = ended_at if scheduler.unfinished else now + begun
        while coming and coming[0].time <= now:
            job = coming.popleft()
            limit, payload = job.prompt + job.output, Job(GREEDY, 0)
            engine.add(Request(job.number, traffic.tokens(job, vocab), limit, tenant=job.tenant, payload=payload))
        if not scheduler.unfinished or scheduler.stuck:
            scheduler.sealed = not coming
            if coming:
                wake = engine.wake_at()
                soon = coming[0].time - now if wake is None else min(coming[0].time - now, wake - clock())
                sleep(max(0.0, min(soon, LONGEST_SLEEP)))
            before = clock()
        if not scheduler.unfinished:
            continue
        outputs = engine.step()
        ended_at = clock()
        now = ended_at - begun
        if planned and planned[-1].work:
            records.append(StepRecord.of(planned[-1].work, ended_at - before, before - begun))
        planned.clear()
        for output in outputs:
            number = cast(int, output.request)
            served, ended = run.times[number], output.finish is not None
            if (started := engine.started.pop(number, None)) is not None:
                run.last_started = max(run.last_started, started - begun)
            served.receive(now, len(output.tokens), ended)
            if ended:
                served.blocked = output.blocked
                run.ends.append(number)
        advance(len(run.ends), scheduler.config.policy)
    while engine.busy:  # copies to lower tiers
        engine.step()
    run.seconds = max(clock() - begun - jobs[0].time, 1e-9)
    run.preemptions, run.steps = scheduler.preemptions, len(records)
    run.swapped = swapped_bytes(scheduler.state) - swapped
    return run, records
