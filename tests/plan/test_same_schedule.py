"""The simulator and the engine make the same plans for the same trace; all predictions of queueing depend on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from bankfull.config import SchedConfig, StateConfig
from bankfull.limits.meter.closed_form import forms_by_operation
from bankfull.limits.meter.metered import MeteredModel
from bankfull.limits.meter.step import StepShape
from bankfull.ops.cost import Rates
from bankfull.plan.simulate import Replica, ReplicaSpec, RequestTimes
from bankfull.plan.step_times import TERMS, Efficiency, StepTimes, TimeBreakdown
from bankfull.plan.traffic import TraceRequest, TrafficSpec, UniformLengths
from bankfull.runtime.memory import Sizes
from bankfull.traffic.arrivals import Arrivals
from bankfull.types import Output, StepPlan, StepResult
from bankfull.weights.source import open_model
from tests.kit import Bench, device_of
from tests.plan.machines import MACHINE
from tests.tiny import VOCAB, folder_of, model_of

HALF = Efficiency(dict.fromkeys(TERMS, 0.5), 1e-5, 1e-6, "a test", assumed=True)
ComparedPlan = tuple[object, ...]


def told(plan: StepPlan) -> ComparedPlan:
    """A plan without the parts that only the runner reads."""
    work = [(w.row, w.start, w.count, w.drafts, w.sample, w.slots) for w in plan.work]
    enter = [(e.row, e.computed, e.prompt_len, e.child, e.slot, len(e.tokens)) for e in plan.enter]
    pages = [(p.group, p.row, p.first, p.pages) for p in plan.pages]
    return plan.step, work, enter, list(plan.leave), pages, list(plan.transfers)


def engine_plans(bench: Bench, trace: Sequence[TraceRequest], times: StepTimes) -> list[ComparedPlan]:
    """The real engine, computing, with requests that arrive while steps take their predicted times."""
    plans: list[ComparedPlan] = []
    free_at, now = 0.0, 0.0
    ends: dict[int, float] = {}

    def note(plan: StepPlan) -> None:
        nonlocal free_at
        plans.append(told(plan))
        free_at = max(now, free_at) + (times.work(plan.work, TimeBreakdown()) if plan.work else 0.0)
        ends[plan.step] = free_at

    bench.engine.on_launch.append(note)
    settle = bench.engine.scheduler.settle

    def settle_in_time(plan: StepPlan, result: StepResult) -> list[Output]:
        nonlocal now
        now = max(now, ends[plan.step])
        return settle(plan, result)

    bench.engine.scheduler.settle = settle_in_time  # type: ignore[method-assign]
    coming = list(enumerate(trace))
    while coming or bench.engine.busy:
        while coming and coming[0][1].time <= now:
            number, arrival = coming.pop(0)
            bench.add(number, arrival.prompt, arrival.output)
        if not bench.engine.busy:
            now = max(now, coming[0][1].time)
            continue
        bench.step()
    return plans


def simulated_plans(
    bench: Bench, trace: Sequence[TraceRequest], times: StepTimes
) -> tuple[list[ComparedPlan], list[RequestTimes]]:
    spec = ReplicaSpec(
        bench.manager.layout,
        Sizes(bench.manager.pages.size, bench.manager.slots.size, bench.sched.rows, bench.max_len),
        bench.sched,
        bench.state,
        bench.depth,
        times,
        queue=10**6,
    )
    requests = [RequestTimes(a.time, len(a.prompt), a.output) for a in trace]
    replica = Replica(spec, requests, trace, stepped=True)
    plans: list[ComparedPlan] = []
    replica.engine.on_launch.append(lambda plan: plans.append(told(plan)))
    for number, served in enumerate(requests):
        replica.run_until(served.arrived)
        replica.assign(number)
    replica.run_until(float("inf"))
    return plans, requests


CASES = {
    "roomy": (SchedConfig(rows=6, step_tokens=32), StateConfig(page_tokens=4), 400),
    "few rows": (SchedConfig(rows=2, step_tokens=8, policy="priority"), StateConfig(page_tokens=4), 400),
    "chunks of three": (SchedConfig(rows=4, step_tokens=3), StateConfig(page_tokens=2), 400),
    "short of pages": (SchedConfig(rows=6, step_tokens=16), StateConfig(page_tokens=2), 30),
    "no cache": (SchedConfig(rows=5, step_tokens=16), StateConfig(page_tokens=4, prefix_cache=False), 30),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("shape", ["llama", "gemma", "mamba"])
@pytest.mark.parametrize("case", CASES)
def test_simulator_and_engine_make_the_same_plans_of_the_same_trace(case: str, shape: str, depth: int) -> None:
    sched, state, frames = CASES[case]
    bench = Bench(model_of(shape), device_of(depth), depth, replace(sched), state, frames=frames, max_len=64)
    times = StepTimes(forms_by_operation(MeteredModel(open_model(folder_of(shape)))), MACHINE, Rates.flat(1e9), HALF)
    # About four requests are in flight, by the predicted times.
    rate = 4 / (10 * times.likely(StepShape.decode(4, 25)))
    traffic = TrafficSpec(Arrivals(rate), UniformLengths(9, 30), UniformLengths(1, 18), shared=6)
    trace = traffic.trace(24, VOCAB, seed=Random(f"{case}/{shape}/{depth}").randrange(1000))
    expected = engine_plans(bench, trace, times)
    found, requests = simulated_plans(
        Bench(model_of(shape), device_of(depth), depth, replace(sched), state, frames=frames, max_len=64), trace, times
    )
    assert len(expected) > 30
    assert any(len(plan[1]) > 1 for plan in expected), "no two requests ran together, so the trace proves nothing"
    for one, other in zip(expected, found, strict=True):
        assert one == other
    assert [served.tokens for served in requests] == [arrival.output for arrival in trace]
    if case == "short of pages" and shape == "llama":
        assert bench.engine.scheduler.preemptions > 0
