"""Plain decode steps that a simulation takes together change nothing: every figure is that of single steps."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bankfull.config import SchedConfig, StateConfig
from bankfull.engine import Engine
from bankfull.limits.meter.closed_form import forms_by_operation
from bankfull.limits.meter.metered import MeteredModel
from bankfull.limits.meter.step import StepShape
from bankfull.ops.cost import Rates
from bankfull.plan.simulate import ReplicaSpec, Run, simulate
from bankfull.plan.step_times import TERMS, Efficiency, StepTimes
from bankfull.plan.traffic import TraceRequest, TrafficSpec, UniformLengths
from bankfull.runtime.memory import Sizes
from bankfull.state.spec import Paged, TensorSpec, layout_of
from bankfull.traffic.arrivals import Arrivals
from bankfull.weights.source import open_model
from tests.plan.machines import MACHINE
from tests.quick import examples
from tests.tiny import VOCAB, folder_of

LAYOUT = layout_of([(Paged((TensorSpec("k", (1, 4), "float32"),)),)], 4)
HALF = Efficiency(dict.fromkeys(TERMS, 0.5), 1e-5, 1e-6, "a test", assumed=True)


@cache
def times() -> StepTimes:
    return StepTimes(forms_by_operation(MeteredModel(open_model(folder_of("llama")))), MACHINE, Rates.flat(1e9), HALF)


def spec(rows: int, frames: int, depth: int, policy: str = "priority") -> ReplicaSpec:
    sched = SchedConfig(rows=rows, step_tokens=32, policy=policy)
    return ReplicaSpec(LAYOUT, Sizes(frames, 0, rows, 200), sched, StateConfig(page_tokens=4), depth, times(), 10**6)


def trace_of(load: float, requests: int, output: int, seed: int) -> tuple[TraceRequest, ...]:
    """`load`: requests that run at once if all are served."""
    rate = load / (output * times().likely(StepShape.decode(4, 25)))
    traffic = TrafficSpec(Arrivals(rate), UniformLengths(5, 30), UniformLengths(1, output), shared=4)
    return traffic.trace(requests, VOCAB, seed)


def same(one: Run, other: Run) -> None:
    for name in ("requests", "seconds", "busy", "mean_batch", "most_pages", "preemptions", "full_rows", "most_rows"):
        assert getattr(one, name) == getattr(other, name), name
    assert one.most_tokens == other.most_tokens
    for name in ("overhead", "exchange", "least", "steps", "prefill"):
        assert getattr(one.spent, name) == getattr(other.spent, name), name
    assert np.array_equal(one.spent.terms, other.spent.terms)


@given(
    rows=st.integers(1, 8),
    frames=st.integers(60, 400),
    depth=st.sampled_from([0, 1]),
    policy=st.sampled_from(["priority", "fcfs", "mlfq"]),
    load=st.floats(0.2, 8.0),
    output=st.integers(2, 80),
    replicas=st.integers(1, 3),
    seed=st.integers(0, 10**6),
)
@examples(60)
def test_a_stride_has_the_result_of_its_steps(
    rows: int, frames: int, depth: int, policy: str, load: float, output: int, replicas: int, seed: int
) -> None:
    trace, own = trace_of(load, 24, output, seed), spec(rows, frames, depth, policy)
    same(simulate(own, trace, replicas), simulate(own, trace, replicas, stepped=True))


@pytest.mark.parametrize("depth", [0, 1])
def test_most_steps_of_long_answers_are_taken_together(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stepped: list[int] = []
    plain = Engine.step
    monkeypatch.setattr(Engine, "step", lambda engine: (stepped.append(1), plain(engine))[1])
    run = simulate(spec(8, 400, depth), trace_of(2.0, 20, 150, seed=1))
    assert run.spent.steps > 400 and len(stepped) < run.spent.steps / 3
