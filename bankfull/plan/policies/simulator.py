"""Jobs on a simulated engine under one scheduling policy.

Policies that preempt have more steps that cannot be taken together, and take up to twice as long to simulate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from bankfull.config import SchedConfig, StateConfig
from bankfull.plan.engine import SimulatedEngine
from bankfull.plan.fake_runner import Clock
from bankfull.plan.policies.jobs import JobTraffic, TrafficJob
from bankfull.plan.policies.machine_speed import MachineSpeed
from bankfull.plan.policies.step_model import StepModel
from bankfull.plan.simulate import RequestTimes
from bankfull.plan.stride import Ends
from bankfull.sched.sequence import Sequence as Running
from bankfull.state.lower_tier import LowerTier
from bankfull.state.manager import StateManager
from bankfull.state.spec import Paged, TensorSpec, layout_of
from bankfull.state.tiers import Tiers
from bankfull.types import Output, Request, Tier, Work

PAGE_TOKENS = 16
PARKED = 8
"""Default memory of a simulated device, in sequences of the largest length for each row: the state of preempted
sequences stays in it."""
VOCABULARY = 50_000
Advance = Callable[[int, str], None]


@dataclass(slots=True)
class JobRun:
    """What became of the jobs."""

    times: list[RequestTimes]
    seconds: float
    """Seconds from the first arrival to the last end."""
    preemptions: int
    swapped: int
    """Bytes that moved between the device and lower tiers."""
    steps: int
    ends: list[int] = field(default_factory=list)
    """Numbers of the jobs in the order of their ends."""
    last_started: float = 0.0
    """Time at which the last job got a row."""


def state_of(sched: SchedConfig, traffic: JobTraffic, memory_tokens: int) -> StateManager:
    """`memory_tokens`: KV cache in tokens; 0 = enough for `PARKED` sequences per row."""
    spec = Paged((TensorSpec("k", (1, 1), "float32"), TensorSpec("v", (1, 1), "float32")))
    per_sequence = -(-traffic.most_tokens // PAGE_TOKENS) + 1
    frames = memory_tokens // PAGE_TOKENS or PARKED * sched.rows * per_sequence
    return StateManager(layout_of([(spec,)], PAGE_TOKENS), frames, 0, StateConfig(page_tokens=PAGE_TOKENS))


class JobEngine(SimulatedEngine):
    """One engine."""

    def __init__(
        self,
        sched: SchedConfig,
        model: StepModel,
        traffic: JobTraffic,
        *,
        memory_tokens: int = 0,
        host_tokens: int = 0,
        token_bytes: int = 1,
        speed: MachineSpeed | None = None,
        stepped: bool = False,
    ) -> None:
        """`host_tokens`: a tier below the device, whose copies run beside the steps; `token_bytes`: of a token's
        state; `speed`: of the machine in the course of the run, if it is not the model's all the time."""
        self._model, self._traffic, self._speed = model, traffic, speed
        state, clock = state_of(sched, traffic, memory_tokens), Clock()
        if host_tokens:
            lower, size = LowerTier(Tier.HOST, host_tokens // PAGE_TOKENS, 0), PAGE_TOKENS * token_bytes
            pools = state.pages, state.slots
            state.tiers = Tiers(*pools, [lower], state.moves, page_bytes=size, slot_bytes=1, clock=clock)
        super().__init__(sched, state, clock=clock, stepped=stepped)
        self.scheduler.pace.forecast = model.prefill
        self._run = JobRun([], 0.0, 0, 0, 0)
        self._jobs: dict[int, TrafficJob] = {}

    def run(self, jobs: Sequence[TrafficJob], advance: Advance = lambda done, note: None) -> JobRun:
        """Run all jobs to their ends."""
        run, told = self._run, 0
        self.expect(jobs, [RequestTimes(job.time, job.prompt, job.output) for job in jobs])
        while self.proceed():
            if len(run.ends) - told >= 1000:
                told = len(run.ends)
                advance(told, self.scheduler.config.policy)
        self.check()
        run.seconds = max(self.clock.now - jobs[0].time, 1e-9)
        run.preemptions, run.steps = self.scheduler.preemptions, self.engine.totals.steps
        run.swapped = swapped_bytes(self.state)
        return run

    def expect(self, jobs: Sequence[TrafficJob], times: list[RequestTimes]) -> None:
        """These jobs will arrive. `times`: of all jobs, by their numbers."""
        self._run.times = times
        self._jobs.update((job.number, job) for job in jobs)
        self.coming.extend((job.time, job.number) for job in jobs)

    @property
    def ends(self) -> list[int]:
        """Numbers of the jobs that have ended."""
        return self._run.ends

    def arrive(self, number: int) -> None:
        job = self._jobs.pop(number)
        prompt = self._traffic.tokens(job, VOCABULARY)
        self.engine.add(Request(number, prompt, job.prompt + job.output, tenant=job.tenant))

    def receive(self, outputs: list[Output]) -> None:
        """The times between a job's first token and its last one do not count: strides do not tell them."""
        for output in outputs:
            number = cast(int, output.request)
            served = self._run.times[number]
            if served.first is None and output.tokens:
                served.first = self.clock.now
                self._run.last_started = max(self._run.last_started, self.engine.started.pop(number))
            if output.finish is not None:
                served.tokens, served.last, served.blocked = served.output, self.clock.now, output.blocked
                self._run.ends.append(number)

    def step_seconds(self, work: Sequence[Work]) -> float:
        seconds = self._model.of(work)
        return seconds if self._speed is None else self._speed.seconds(self.clock.now, seconds)

    def plain_ends(self, running: Sequence[Running], most: int, until: float) -> Ends:
        rows, now, speed, ends = len(running), self.clock.now, self._speed, list[float]()
        context, seconds_of = sum(seq.start for seq in running) + rows, self._model.seconds
        while len(ends) < most and now < until:
            seconds = seconds_of(rows, context, 0)
            now += seconds if speed is None else speed.seconds(now, seconds)
            context += rows
            ends.append(now)
        return ends


def swapped_bytes(state: StateManager) -> int:
    """Bytes that moved to and from lower tiers."""
    tiers: Any = state.tiers
    return 0 if tiers is None else sum(tier.traffic.written + tier.traffic.read for tier in tiers.lower)


def saturation(sched: SchedConfig, model: StepModel, traffic: JobTraffic) -> float:
    """Jobs per second that an engine completes while its queue is never empty."""
    run = JobEngine(sched, model, traffic).run(traffic.draw(float("inf")))
    until = run.last_started
    ended = sum(one.last is not None and one.last <= until for one in run.times)
    if ended < len(run.times) // 2:  # so few jobs that most run at once
        return len(run.times) / run.seconds
    return ended / until
