"""Queueing theory, replicas and routing, and a full queue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from bankfull.config import SchedConfig, StateConfig
from bankfull.plan.fake_runner import Clock, FakeRunner
from bankfull.plan.simulate import ReplicaSpec, Run, simulate
from bankfull.plan.step_times import StepTimes, TimeBreakdown
from bankfull.plan.traffic import TraceRequest, TrafficSpec, UniformLengths
from bankfull.runtime.memory import Sizes
from bankfull.state.spec import Paged, TensorSpec, layout_of
from bankfull.traffic.arrivals import Arrivals
from bankfull.types import Enter, StepPlan, Work

LAYOUT = layout_of([(Paged((TensorSpec("k", (1, 4), "float32"),)),)], 4)


class Constant(StepTimes):
    """Every step takes the same time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def work(self, work: Sequence[Work], spent: TimeBreakdown) -> float:
        spent.overhead += self.seconds
        spent.steps += 1
        return self.seconds

    def decodes(self, work: Sequence[Work]) -> Iterator[TimeBreakdown]:
        while True:
            yield TimeBreakdown(overhead=self.seconds, steps=1)


def spec(
    seconds: float = 1.0, rows: int = 1, frames: int = 1000, depth: int = 0, queue: int | None = None
) -> ReplicaSpec:
    sched, sizes = SchedConfig(rows=rows, step_tokens=64), Sizes(frames, 0, rows, 1000)
    return ReplicaSpec(LAYOUT, sizes, sched, StateConfig(page_tokens=4), depth, Constant(seconds), queue)


def poisson(rate: float, requests: int, output: int = 1, seed: int = 0) -> tuple[TraceRequest, ...]:
    return TrafficSpec(Arrivals(rate), UniformLengths(5, 5), UniformLengths(output, output)).trace(requests, 50, seed)


def mean_wait(run: Run) -> float:
    return sum(served.ttft - 1.0 for served in run.finished) / len(run.finished)


@pytest.mark.few(1)
@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_one_row_and_steps_of_one_length_wait_as_in_m_d_1(load: float) -> None:
    waits = [mean_wait(simulate(spec(queue=10**6), poisson(load, 4000, seed=seed))) for seed in range(3)]
    assert sum(waits) / 3 == pytest.approx(load / (2 * (1 - load)), rel=0.15)


def test_a_step_serves_all_rows_and_times_are_counted_from_arrival() -> None:
    trace = tuple(TraceRequest(time, (n, 1, 2, 3, 4), 3) for n, time in enumerate((0.0, 0.25, 0.5)))
    run = simulate(spec(rows=3), trace)
    assert [served.first for served in run.requests] == [1.0, 2.0, 2.0]
    assert [served.last for served in run.requests] == [3.0, 4.0, 4.0]
    assert [served.ttft for served in run.requests] == [1.0, 1.75, 1.5]
    assert all(served.tpot == 1.0 and served.longest_gap == 1.0 for served in run.requests)
    assert run.spent.steps == 4 and run.mean_batch == pytest.approx(9 / 4) and run.busy == 1.0
    assert run.most_rows == 3 and run.most_tokens == 11


def test_at_depth_1_a_device_never_waits_for_its_host() -> None:
    run = simulate(spec(depth=1), (TraceRequest(0.0, (1, 2, 3, 4, 5), 4),))
    (served,) = run.requests
    assert (served.first, served.last) == (1.0, 4.0) and run.busy == 1.0


def test_least_loaded_waits_less_than_round_robin() -> None:
    random = TrafficSpec(Arrivals(1.2), UniformLengths(5, 5), UniformLengths(1, 9)).trace(1500, 50, seed=2)
    turns, least = (simulate(spec(0.3, queue=10**6), random, 2, route) for route in ("round-robin", "least-loaded"))
    assert len(turns.finished) == len(least.finished) == 1500
    waits = [sum(served.ttft for served in run.finished) for run in (turns, least)]
    assert waits[1] < 0.9 * waits[0]


def test_two_replicas_in_turns_are_two_queues() -> None:
    trace = tuple(TraceRequest(float(n // 2), (n, 1, 2, 3, 4), 1) for n in range(8))
    run = simulate(spec(), trace, 2)
    assert all(served.ttft == 1.0 for served in run.requests)


def test_a_full_queue_refuses_as_the_server_does() -> None:
    trace = tuple(TraceRequest(0.0, (n, 1, 2, 3, 4), 5) for n in range(9))
    run = simulate(spec(rows=2), trace)
    assert sum(served.refused for served in run.requests) == 9 - 2 * 2
    assert len(run.finished) == 4 and run.full_rows > 0
    assert sum(served.refused for served in simulate(spec(rows=2, queue=0), trace).requests) == 7


def test_what_can_never_run_is_refused_and_the_others_go_on() -> None:
    trace = (TraceRequest(0.0, tuple(range(60)), 5), TraceRequest(0.0, (1, 2, 3, 4, 5), 5))
    run = simulate(spec(rows=2, frames=8), trace)
    assert [served.refused for served in run.requests] == [True, False] and len(run.finished) == 1


def test_short_pages_preempt_and_everything_still_ends() -> None:
    trace = tuple(TraceRequest(0.0, (n, *range(10)), 30) for n in range(4))
    run = simulate(spec(rows=4, frames=20), trace)
    assert run.preemptions > 0 and len(run.finished) == 4 and run.most_pages <= 20


def test_a_prompt_in_the_cache_is_not_computed_again() -> None:
    prompt = tuple(range(40))
    run = simulate(spec(), (TraceRequest(0.0, prompt, 1), TraceRequest(5.0, prompt, 1)))
    assert [served.cached for served in run.requests] == [0, 36]


def test_a_row_that_changes_hands_does_not_take_another_s_token() -> None:
    clock = Clock()
    runner = FakeRunner(clock, lambda work: 1.0, token=lambda request, position: 100 * request + position)
    first = StepPlan(0, [Work(0, 0, 2, 0, True)], [Enter(1, 0, (8, 9), 0, 2, 0, 0, None)])
    earlier = runner.forward(first)
    second = StepPlan(1, [Work(0, 0, 1, 0, True)], [Enter(2, 0, (8,), 0, 1, 0, 0, None)])
    later = runner.forward(second)
    assert earlier.wait().tokens == [[102]] and clock.now == 1.0
    assert later.wait().tokens == [[201]] and clock.now == 2.0
