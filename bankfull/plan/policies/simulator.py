"""Jobs through the engine's own loop, scheduler and state, on a device that only models time.

Plain decode steps are taken together (`sched.stride`), with the same result as single steps. Policies that preempt have
more steps that are not plain, and take up to twice as long. With a host tier every step is taken alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from bankfull.config import SchedConfig, StateConfig
from bankfull.decode.plain import Plain
from bankfull.engine import Engine
from bankfull.plan.fake_runner import Clock, FakeRunner
from bankfull.plan.policies.jobs import JobTraffic, TrafficJob
from bankfull.plan.policies.machine_speed import MachineSpeed
from bankfull.plan.policies.step_model import StepModel
from bankfull.plan.simulate import RequestTimes
from bankfull.sched.scheduler import Scheduler
from bankfull.sched.sequence import Sequence as Running
from bankfull.sched.stride import plain_steps, take_plain_steps
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


class SimulatedEngine:
    """One engine. `stepped`: every step runs through the loop, which is slower and gives the same result."""

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
        self.clock = Clock()
        self._model, self._traffic, self._speed, self._stepped = model, traffic, speed, stepped
        self._state = state_of(sched, traffic, memory_tokens)
        if host_tokens:
            lower = LowerTier(Tier.HOST, host_tokens // PAGE_TOKENS, 0)
            pages, page_bytes = self._state.pages, PAGE_TOKENS * token_bytes
            self._state.tiers = Tiers(
                pages,
                self._state.slots,
                [lower],
                self._state.moves,
                page_bytes=page_bytes,
                slot_bytes=1,
                clock=self.clock,
            )
        self.scheduler = Scheduler(sched, self._state, clock=self.clock)
        self.scheduler.pace.forecast = model.prefill
        # The engine's own check counts all pages whenever it becomes idle; `run` does so once.
        self._check, self._state.check = self._state.check, lambda: None  # type: ignore[method-assign]
        self._runner = FakeRunner(self.clock, self._step_seconds, lambda request, position: 0)
        self._engine: Engine[FakeRunner] = Engine(self.scheduler, self._runner, Plain(), 0, clock=self.clock)
        self._run = JobRun([], 0.0, 0, 0, 0)
        self._coming: deque[TrafficJob] = deque()
        self._horizon = float("inf")
        """Time up to which all arrivals are known."""

    def _step_seconds(self, work: Sequence[Work]) -> float:
        seconds = self._model.of(work)
        return seconds if self._speed is None else self._speed.seconds(self.clock.now, seconds)

    @property
    def unfinished(self) -> int:
        return self.scheduler.unfinished + len(self._coming)

    def run(self, jobs: Sequence[TrafficJob], advance: Advance = lambda done, note: None) -> JobRun:
        """Run all jobs to their ends."""
        run = self._run
        run.times = [RequestTimes(job.time, job.prompt, job.output) for job in jobs]
        self._coming.extend(jobs)
        told = 0
        while self.proceed():
            if len(run.ends) - told >= 1000:
                told = len(run.ends)
                advance(told, self.scheduler.config.policy)
        self._check()
        run.seconds = max(self.clock.now - jobs[0].time, 1e-9)
        run.preemptions, run.steps = self.scheduler.preemptions, self._engine.totals.steps
        run.swapped = swapped_bytes(self._state)
        return run

    def proceed(self) -> bool:
        """One event: an arrival at an idle engine, a step, or a stride; False when nothing is left to do."""
        self._take_in()
        coming, engine, scheduler = self._coming, self._engine, self.scheduler
        if not engine.busy:
            if not coming:
                return False
            self.clock.now = max(self.clock.now, coming[0].time)
            return True
        if scheduler.stuck:
            times = [coming[0].time] if coming else []
            times += [] if (wake := engine.wake_at()) is None else [wake]
            if not times:
                scheduler.sealed = True  # nothing will arrive: the last batch stays incomplete
            else:
                self.clock.now = max(self.clock.now, min(times))
                self._take_in()
        if self._stepped or not self._stride():
            for output in engine.step():
                self._receive(output)
        return True

    def run_until(self, time: float) -> None:
        """Take every step that begins before this time."""
        self._horizon = time
        while self.clock.now < time and (self._engine.busy or (self._coming and self._coming[0].time < time)):
            self.proceed()

    def receive(self, job: TrafficJob, times: list[RequestTimes]) -> None:
        """A job arrives that was not known before. `times`: of all jobs, by their numbers."""
        self._run.times = times
        self._coming.append(job)

    @property
    def ends(self) -> list[int]:
        """Numbers of the jobs that have ended."""
        return self._run.ends

    @property
    def engine(self) -> Engine[FakeRunner]:
        return self._engine

    def _take_in(self) -> None:
        while self._coming and self._coming[0].time <= self.clock.now:
            job = self._coming.popleft()
            prompt = self._traffic.tokens(job, VOCABULARY)
            self._engine.add(Request(job.number, prompt, job.prompt + job.output, tenant=job.tenant))

    def _receive(self, output: Output) -> None:
        """The times between a job's first token and its last one do not count: strides do not tell them."""
        number = cast(int, output.request)
        served = self._run.times[number]
        if served.first is None and output.tokens:
            served.first = self.clock.now
            self._run.last_started = max(self._run.last_started, self._engine.started.pop(number))
        if output.finish is not None:
            self._ended(number, output.blocked)

    def _ended(self, number: int, blocked: float) -> None:
        served = self._run.times[number]
        served.tokens, served.last, served.blocked = served.output, self.clock.now, blocked
        self._run.ends.append(number)

    def _plain_ends(self, running: Sequence[Running], most: int, arrival: float) -> list[float]:
        """When the next plain steps end: at most so many, up to the first one that ends after `arrival`."""
        rows, now, speed, ends = len(running), self.clock.now, self._speed, list[float]()
        context, seconds_of = sum(seq.start for seq in running) + rows, self._model.seconds
        while len(ends) < most and now < arrival:
            seconds = seconds_of(rows, context, 0)
            now += seconds if speed is None else speed.seconds(now, seconds)
            context += rows
            ends.append(now)
        return ends

    def _stride(self) -> bool:
        """Take plain steps up to the next arrival; False if the next step is not plain."""
        scheduler, policy = self.scheduler, self.scheduler.policy
        most = plain_steps(scheduler)
        if not most:
            return False
        arrival = min(self._horizon, self._coming[0].time if self._coming else float("inf"))
        running = scheduler._running
        begun = self.clock.now
        ends = self._plain_ends(running, most, arrival)
        del ends[policy.steps_to_change(running, begun, ends) :]
        steps, last = len(ends), ends[-1]
        self.clock.now = last
        self._runner.free_from(last)
        before = [begun, *ends[:-1]]
        seconds = [end - start for start, end in zip(before, ends, strict=True)]
        ended = take_plain_steps(scheduler, steps, _decoded, seconds)
        self._engine.totals.steps += steps
        for seq in ended:
            self._ended(cast(int, seq.request.id), seq.blocked)
        return True


def _decoded(seq: Running, count: int) -> list[int]:
    return [0] * count


def swapped_bytes(state: StateManager) -> int:
    """Bytes that moved to and from lower tiers."""
    tiers: Any = state.tiers
    return 0 if tiers is None else sum(tier.traffic.written + tier.traffic.read for tier in tiers.lower)


def saturation(sched: SchedConfig, model: StepModel, traffic: JobTraffic) -> float:
    """Jobs per second that an engine completes while its queue is never empty."""
    run = SimulatedEngine(sched, model, traffic).run(traffic.draw(float("inf")))
    until = run.last_started
    ended = sum(one.last is not None and one.last <= until for one in run.times)
    if ended < len(run.times) // 2:  # so few jobs that most run at once
        return len(run.times) / run.seconds
    return ended / until
