"""Policies side by side: the simulator's strides, the engine's steps, and what is promised about them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bankfull.config import SchedConfig
from bankfull.errors import ConfigError
from bankfull.llm import LLM
from bankfull.plan.fake_runner import Clock
from bankfull.plan.policies.compare import CONTENDERS, agreement, contenders, figures, policy_chart
from bankfull.plan.policies.jobs import JobTraffic
from bankfull.plan.policies.machine_speed import MachineSpeed
from bankfull.plan.policies.measure import measure, memory_tokens, scheduled
from bankfull.plan.policies.simulator import JobEngine, JobRun, saturation
from bankfull.plan.policies.step_model import StepModel, StepRecord, fit
from bankfull.plan.simulate import RequestTimes
from bankfull.sched.policies.mlfq import SkipJoinMlfq
from bankfull.sched.policies.srpt import Srpt
from bankfull.sched.sequence import Sequence
from bankfull.scheduling import POLICIES, SchedulingWay
from bankfull.types import StepPlan
from tests.quick import examples
from tests.tiny import speaking_folder

BASE = SchedConfig(rows=8, step_tokens=512)
MODEL = StepModel()
REACH = JobTraffic(jobs=2500, burstiness=1.0)


def simulated(name: str, traffic: JobTraffic, rate: float, base: SchedConfig = BASE, **options: Any) -> JobRun:
    return JobEngine(contenders(base, [name])[name], MODEL, traffic, **options).run(traffic.draw(rate))


@examples(25)
@given(
    st.sampled_from(CONTENDERS),
    st.integers(0, 10_000),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([5.0, 20.0, 80.0]),
    st.sampled_from([0, 3000]),
    st.sampled_from([1, 3]),
    st.booleans(),
    st.sampled_from([0, 0, 2000]),
)
def test_strides_equal_single_steps(
    name: str, seed: int, rows: int, rate: float, memory_tokens: int, keys: int, busy: bool, host_tokens: int
) -> None:
    """Identical times, blocking, ends and counters, to the last bit."""
    traffic = JobTraffic(jobs=40, seed=seed, shortest=4, longest=200, keys=keys)
    base = SchedConfig(rows=rows, step_tokens=64, quantum_ms=20.0, starvation=0.5)
    memory = max(memory_tokens, traffic.most_tokens + 64) if memory_tokens else 0
    speed = MachineSpeed(MODEL, [StepRecord(2, 90, 0, 0.03 + 0.01 * (at % 5), 0.1 * at) for at in range(50)])
    options: dict[str, Any] = {"memory_tokens": memory, "host_tokens": host_tokens, "speed": speed if busy else None}
    fast, slow = (simulated(name, traffic, rate, base, stepped=stepped, **options) for stepped in (False, True))
    for one, other in zip(fast.times, slow.times, strict=True):
        assert (one.first, one.last, one.tokens, one.blocked) == (other.first, other.last, other.tokens, other.blocked)
    assert (fast.seconds, fast.preemptions, fast.steps) == (slow.seconds, slow.preemptions, slow.steps)
    assert (fast.ends, fast.swapped) == (slow.ends, slow.swapped)


class Alternating(Srpt):
    """A policy that strides do not know: its ranks change with the number of steps."""

    steps = 0

    def rank(self, sequence: Sequence, now: float) -> float:
        return super().rank(sequence, now) * (-1 if self.steps // 50 % 2 else 1)

    def after(self, plan: StepPlan, served: list[Sequence], now: float, seconds: float) -> list[Sequence]:
        self.steps += 1
        return [*served, *self.facts.waiting]


def test_a_policy_that_strides_do_not_know_is_simulated_as_it_would_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bankfull.sched.policies.alternating", sys.modules[__name__])
    way = SchedulingWay("in turns", made_by="alternating.Alternating")
    monkeypatch.setitem(POLICIES, "alternating", way)
    traffic, sched = JobTraffic(jobs=40, shortest=4, longest=200), SchedConfig(rows=2, policy="alternating")
    fast, slow = (JobEngine(sched, MODEL, traffic, stepped=stepped).run(traffic.draw(5.0)) for stepped in (False, True))
    assert (fast.times, fast.ends, fast.steps) == (slow.times, slow.ends, slow.steps) and fast.preemptions > 0


def test_skip_join_mlfq_is_far_ahead_of_fcfs_and_near_the_oracle() -> None:
    rate = 0.9 * saturation(BASE, MODEL, REACH)
    mean = {}
    for name in ("fcfs", "skip-join-mlfq", "srpt"):
        mean[name] = figures(name, simulated(name, REACH, rate), MODEL, 3.0).jct_mean
    assert mean["skip-join-mlfq"] <= 0.6 * mean["fcfs"]
    assert mean["skip-join-mlfq"] <= 1.5 * mean["srpt"]


MIXED = {
    "short and long prompts": (JobTraffic(jobs=150, prompts=(48, 2000)), 8, 0.9),
    "a lower load in bursts": (JobTraffic(jobs=150, prompts=(48, 2000), burstiness=0.3), 8, 0.7),
    "answers of nearly equal lengths": (JobTraffic(jobs=150, prompts=(48, 2000), shortest=64, longest=128), 8, 0.9),
    "rows for all": (JobTraffic(jobs=150, prompts=(48, 4000)), 32, 0.9),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", MIXED)
def test_skip_join_mlfq_is_no_worse_than_fcfs_on_mixed_prompts(name: str) -> None:
    traffic, rows, load = MIXED[name]
    base, mean = replace(BASE, rows=rows), dict.fromkeys(("fcfs", "skip-join-mlfq"), 0.0)
    for seed in range(3):
        drawn = replace(traffic, seed=seed)
        rate = load * saturation(base, MODEL, drawn)
        for policy in mean:
            mean[policy] += figures(policy, simulated(policy, drawn, rate, base), MODEL, 3.0).jct_mean
    assert mean["skip-join-mlfq"] <= mean["fcfs"]


@examples(15)
@given(st.sampled_from(["mlfq", "skip-join-mlfq"]), st.integers(0, 10_000), st.sampled_from([1, 4]))
def test_no_job_waits_longer_than_the_stated_bound(name: str, seed: int, rows: int) -> None:
    """The bound of docs/scheduling.md, on every wait of every job, under overload."""
    traffic = JobTraffic(jobs=60, seed=seed, shortest=8, longest=300, burstiness=0.3)
    base = SchedConfig(rows=rows, step_tokens=512, quantum_ms=20.0, starvation=0.5)
    engine = JobEngine(contenders(base, [name])[name], MODEL, traffic, stepped=True)
    scheduler, clock = engine.scheduler, engine.clock
    since: dict[Any, float] = {}
    longest, most_jobs, longest_step, before, policy = 0.0, 0, 0.0, 0.0, scheduler.policy
    quantum = base.quantum_ms / 1e3
    jobs = traffic.draw(60.0)
    engine.expect(jobs, [RequestTimes(job.time, job.prompt, job.output) for job in jobs])
    while engine.proceed():
        running = {seq.request.id for seq in scheduler.facts.running}
        for seq in scheduler.facts.waiting:
            since.setdefault(seq.request.id, clock.now)
            longest = max(longest, clock.now - since[seq.request.id])
        for done in running & since.keys():
            del since[done]
        most_jobs = max(most_jobs, scheduler.unfinished)
        if running:
            longest_step = max(longest_step, clock.now - before)
        before = clock.now
        if isinstance(policy, SkipJoinMlfq):
            quantum = max(quantum, policy.turn)
    turn = quantum + 2 * longest_step
    assert longest <= base.starvation + (most_jobs / rows + 2) * turn + longest_step


class TimedRunner:
    """A runner that computes, on a clock that moves by the model's time of each step. `slow`: the clock's time -> how
    many times longer a step takes then."""

    def __init__(self, runner: Any, clock: Clock, model: StepModel, slow: Callable[[float], float]) -> None:
        self._runner, self._clock, self._model, self._slow = runner, clock, model, slow

    def forward(self, plan: StepPlan) -> Any:
        if plan.work:
            self._clock.now += self._model.of(plan.work) * self._slow(self._clock.now)
        return self._runner.forward(plan)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def busy_for_a_while(now: float) -> float:
    """Other programs come and go, every few seconds and every few steps."""
    return (1.0 + 2.0 * (now % 7.0 < 3.0)) * (1.0 + 0.5 * (now % 0.11 < 0.03))


@pytest.mark.parametrize("slow", [lambda now: 1.0, busy_for_a_while], ids=["a steady machine", "a busy machine"])
def test_the_simulator_fed_with_an_engines_step_times_gives_its_order_and_its_completion_times(
    slow: Callable[[float], float],
) -> None:
    traffic = JobTraffic(jobs=40, shortest=4, longest=60, prompts=(20, 40), shared=8)
    llm = LLM(str(speaking_folder()), memory="2MiB", rows=4, step_tokens=64, max_model_len=128)
    base, truth, clock = SchedConfig(rows=4, step_tokens=64), StepModel(4e-3, 1e-3, 1e-6, 1e-4), Clock()
    own: Any = llm.loaded.engine
    own.runner = TimedRunner(own.runner, clock, truth, slow)

    def sleep(seconds: float) -> None:
        clock.now += max(seconds, 1e-6)  # rounding must not stop the clock

    rate = 0.5 * saturation(base, truth, replace(traffic, jobs=400))
    jobs, compared = traffic.draw(rate), contenders(base, ())
    measured = {}
    for name, sched in compared.items():
        own = scheduled(own, sched, clock)
        measured[name] = measure(own, jobs, traffic, llm.loaded.frontend.vocab, clock=clock, sleep=sleep)
    model = fit([record for _, records in measured.values() for record in records])
    memory = memory_tokens(own.scheduler.state, traffic)
    runs = {
        name: JobEngine(sched, model, traffic, memory_tokens=memory, speed=MachineSpeed(model, measured[name][1])).run(
            jobs
        )
        for name, sched in compared.items()
    }
    found = agreement(
        [figures(name, run, model, 3.0) for name, (run, _) in measured.items()],
        [figures(name, run, model, 3.0) for name, run in runs.items()],
    )
    assert found.same_order and found.largest_error < 0.1, found
    assert len({round(run.times[-1].e2e, 6) for run in runs.values()}) > 1, "the policies differ"
    steady = {name: JobEngine(sched, model, traffic, memory_tokens=memory) for name, sched in compared.items()}
    alike = agreement(
        [figures(name, run, model, 3.0) for name, (run, _) in measured.items()],
        [figures(name, engine.run(jobs), model, 3.0) for name, engine in steady.items()],
    )
    if slow is busy_for_a_while:
        assert alike.largest_error > 0.1, "the machine's speed matters"
        return
    assert alike.same_order and alike.largest_error < 0.1, alike
    assert model.step == pytest.approx(truth.step, rel=0.05) and model.prompt == pytest.approx(truth.prompt, rel=0.05)


def test_step_times_are_recovered_and_no_term_is_negative() -> None:
    shapes = [(rows, rows * context, prompt) for rows in (0, 1, 8) for context in (10, 500) for prompt in (0, 64, 512)]
    truth = StepModel(3e-3, 2e-5, 1e-8, 4e-5)
    found = fit([StepRecord(*shape, truth.seconds(*shape)) for shape in shapes])
    for name in ("step", "row", "context", "prompt"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=1e-6)
    flat = fit([StepRecord(rows, 0, 0, 1e-3 - 1e-6 * rows) for rows in (1, 2, 8)])
    assert flat.row == 0.0 and flat.step > 0
    with pytest.raises(ConfigError, match="No step"):
        fit([])


def test_agreement_allows_ties_and_notices_another_order() -> None:
    run = JobEngine(BASE, MODEL, JobTraffic(jobs=20)).run(JobTraffic(jobs=20).draw(10.0))
    one = figures("fcfs", run, MODEL, 3.0)
    a, b = replace(one, jct_mean=1.0), replace(one, jct_mean=2.0)
    assert agreement([a, b], [a, b]).same_order and agreement([a, b], [a, b]).largest_error == 0
    assert not agreement([a, b], [b, a]).same_order and agreement([a, b], [b, a]).largest_error == 1.0
    close = replace(one, jct_mean=1.02)
    assert agreement([a, close], [close, a]).same_order


def test_jobs_are_drawn_alike_for_a_seed_whatever_the_rate_and_have_a_heavy_tail() -> None:
    traffic = JobTraffic(jobs=5000, seed=3)
    slow, fast = traffic.draw(1.0), traffic.draw(100.0)
    assert [job.output for job in slow] == [job.output for job in fast]
    outputs = sorted(job.output for job in slow)
    assert outputs[0] == 16 and outputs[-1] == 2048
    assert sum(outputs[-500:]) > 0.4 * sum(outputs), "a tenth of the jobs has much of the work"
    prompts = {traffic.tokens(job, 1000) for job in slow}
    assert len(prompts) == len(slow) and {len(prompt) for prompt in prompts} == {job.prompt for job in slow}


def test_the_chart_ranks_the_policies() -> None:
    run = JobEngine(BASE, MODEL, JobTraffic(jobs=20)).run(JobTraffic(jobs=20).draw(10.0))
    one = figures("fcfs", run, MODEL, 3.0)
    drawn = policy_chart([replace(one, policy="slow", jct_mean=9.0), replace(one, policy="quick")], "title")
    assert list(drawn.x.names) == ["quick", "slow"] and len(drawn.series) == 3
