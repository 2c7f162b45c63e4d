"""Simulates requests through the engine's own loop, scheduler and state, on a device that only models time.

The schedule is not modelled: `Engine`, `Scheduler` and `StateManager` are the real ones, and a test checks that their
plans equal those of an engine that computes. Only the time of a step is modelled.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice, pairwise
from typing import cast

from bankfull.config import SchedConfig, StateConfig
from bankfull.decode.plain import Plain
from bankfull.engine import Engine
from bankfull.errors import ConfigError, RequestError
from bankfull.fleet.prefix_report import PrefixReporter
from bankfull.fleet.routing import DEFAULT_POLICY
from bankfull.plan.fake_runner import Clock, FakeRunner
from bankfull.plan.fleet_front import FleetFront, FleetStep, facts_of, load_of
from bankfull.plan.step_times import StepTimes, TimeBreakdown
from bankfull.plan.traffic import TraceRequest
from bankfull.runtime.memory import Sizes
from bankfull.sched.canvas import Canvas
from bankfull.sched.scheduler import Scheduler
from bankfull.sched.sequence import Sequence as Running
from bankfull.sched.stride import take_plain_steps
from bankfull.state.manager import StateManager
from bankfull.state.spec import Layout
from bankfull.types import CanvasShape, Output, Request, StepPlan, Work

MOST_STEPS = 2_000_000
LEAST_STRIDE = 3
"""Plain steps that are worth taking together: the engine's pipeline is emptied before and filled afterwards."""


@dataclass(slots=True)
class RequestTimes:
    """One request with its arrival and token times."""

    arrived: float
    prompt: int
    output: int
    first: float | None = None
    last: float | None = None
    tokens: int = 0
    newest: float = 0.0
    """Time of the newest token."""
    longest_gap: float = 0.0
    """Longest gap between two tokens."""
    cached: int = 0
    blocked: float = 0.0
    """Seconds that it waited behind others (`sched.blocked`)."""
    refused: bool = False

    def receive(self, now: float, tokens: int, ended: bool) -> None:
        self.tokens += tokens
        if tokens:
            if self.first is None:
                self.first = now
            else:
                self.longest_gap = max(self.longest_gap, now - self.newest)
            self.newest = now
        if ended:
            self.last = now

    @property
    def done(self) -> bool:
        """Whether it received all its tokens."""
        return self.last is not None and self.first is not None

    @property
    def ttft(self) -> float:
        assert self.first is not None
        return self.first - self.arrived

    @property
    def tpot(self) -> float:
        """0 for a single token."""
        assert self.first is not None and self.last is not None
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else 0.0

    @property
    def e2e(self) -> float:
        assert self.last is not None
        return self.last - self.arrived


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """Configuration of one simulated engine."""

    layout: Layout
    sizes: Sizes
    sched: SchedConfig
    state: StateConfig
    depth: int
    times: StepTimes
    queue: int | None = None
    """Requests that may wait beyond the running ones, as in `serve`; None = the number of rows."""
    canvas: CanvasShape | None = None
    """The blocks of a diffusion model."""
    received: bool = False
    """Prompts come with their state from another engine: their last token alone is computed. They are planned as
    others, and take memory and rows."""

    def seconds(self, work: Sequence[Work], spent: TimeBreakdown) -> float:
        """Time of a step, which is added to `spent`."""
        computed = [_last_token(one) for one in work if one.count == 1 or one.sample] if self.received else work
        return self.times.work(computed, spent) if computed else 0.0


def _last_token(work: Work) -> Work:
    return replace(work, start=work.start + work.count - 1, count=1)


class Replica:
    def __init__(
        self,
        spec: ReplicaSpec,
        requests: Sequence[RequestTimes],
        trace: Sequence[TraceRequest],
        stepped: bool = False,
    ) -> None:
        """`stepped`: every step runs through the engine, also the plain ones, with the same result."""
        self.spec, self._requests, self._trace, self._stepped = spec, requests, trace, stepped
        self.clock, self.spent = Clock(), TimeBreakdown()
        # Pages beyond those that all requests fill, plus one per running request, are never used.
        # The last block of a diffusion model may end beyond the request.
        beyond = 0 if spec.canvas is None else min(spec.canvas.length, spec.sizes.max_len)
        total = sum(-(-(len(a.prompt) + a.output + beyond) // g.page_tokens) for a in trace for g in spec.layout.paged)
        frames = min(spec.sizes.frames, total + spec.sizes.rows)
        sched = replace(spec.sched, rows=spec.sizes.rows)
        self.manager = StateManager(spec.layout, frames, spec.sizes.slots, spec.state)
        canvas = None if spec.canvas is None else Canvas(spec.canvas, spec.sizes.max_len)
        self.scheduler = Scheduler(sched, self.manager, clock=self.clock, canvas=canvas)
        self.runner = FakeRunner(self.clock, lambda work: spec.seconds(work, self.spent))
        self.engine = Engine(self.scheduler, self.runner, Plain(), spec.depth, clock=self.clock)
        self.engine.on_launch.append(self._note)
        self.on_step: Callable[[list[Output]], None] | None = None
        """Called with the outputs of each step."""
        self._coming: deque[int] = deque()
        self._ends: list[float] = []
        self._assigned = 0
        self._most = sched.rows + (sched.rows if spec.queue is None else spec.queue)
        self.most_pages = 0
        self.sequences = self.most_rows = self.most_tokens = 0
        """Sequences summed over steps; peak rows and peak tokens of one step."""
        self.full_rows = 0
        """Steps with all rows taken while requests waited."""

    def load(self, time: float) -> int:
        """Requests that had arrived and not ended at this time."""
        return self._assigned - bisect_right(self._ends, time)

    def assign(self, number: int) -> bool:
        """Whether its queue has room for the request."""
        time = self._requests[number].arrived
        if self.load(time) >= self._most:
            self._requests[number].refused = True
            return False
        self._assigned += 1
        self._coming.append(number)
        return True

    def run_until(self, time: float) -> None:
        """Run every step that begins before this time."""
        for _ in range(MOST_STEPS):
            self._take_in()
            if not self.engine.busy:
                if not self._coming or (next_at := self._requests[self._coming[0]].arrived) >= time:
                    return
                self.clock.now = max(self.clock.now, next_at)
                continue
            if self.clock.now >= time:
                return
            if self.scheduler.stuck and not self._wait(time):
                return
            if not self._stepped and self._stride(time):
                continue
            before = self.engine.totals.steps
            outputs = self.engine.step()
            self._deliver(outputs)
            if not outputs and self.engine.totals.steps == before and not self.engine.busy:
                return
        raise ConfigError(
            f"The simulation of this traffic did not end within {MOST_STEPS} steps; give fewer or shorter requests."
        )

    def _deliver(self, outputs: list[Output]) -> None:
        if self.on_step is not None:
            self.on_step(outputs)
        for output in outputs:
            self._receive(output)

    def _stride(self, time: float) -> bool:
        """Take the plain decode steps together that end before the next arrival, before this time and before a
        sequence ends. Each has the time that it has alone, and the next plan finds what it would find after single
        steps: nothing arrives or ends between the plan of a step in flight and its end."""
        until = min(time, self._requests[self._coming[0]].arrived) if self._coming else time
        steps = self._plain_steps()
        if not steps or self.runner.free_at >= until:
            return False
        while self.engine.launched:
            self._deliver(self.engine.settle())
        running = [*self.scheduler._running]
        seconds = self._plain_seconds(running, steps, until)
        if not seconds:
            return False
        ends = [*accumulate(seconds, initial=self.clock.now)]
        apart = [end - start for start, end in pairwise(ends)]  # as the engine's clock measures them
        self.clock.now = ends[-1]
        take_plain_steps(self.scheduler, len(seconds), self._decoded, apart)
        self.engine.took(len(seconds), len(running), ends[-1] - ends[0])
        self.runner.took(seconds, ends[-1])
        pages = self.manager.pages
        self.most_pages = max(self.most_pages, pages.size - pages.available)
        self.sequences += len(seconds) * len(running)
        longest = max(apart[1:], default=0.0)
        for seq in running:
            served = self._requests[cast(int, seq.request.id)]
            served.tokens += len(seconds)
            served.longest_gap = max(served.longest_gap, ends[1] - served.newest, longest)
            served.newest = ends[-1]
        if self.on_step is not None:
            self.on_step([])
        return True

    def _decoded(self, seq: Running, count: int) -> list[int]:
        return self.runner.decode(seq.row, len(seq.tokens), count)

    def _plain_steps(self) -> int:
        """Plain steps after those in flight, none of which ends a sequence; 0 if there are few, or not certainly."""
        scheduler, state = self.scheduler, self.manager
        running, config = scheduler._running, scheduler.config
        if not running or scheduler.waiting or scheduler.policy.counting or self.spec.canvas is not None:
            return 0
        if state.windowed or state.snapshots is not None or state.moving or state.tiers is not None:
            return 0
        if state.pages.coming:  # they count as used until the steps in flight have settled
            return 0
        if len(running) > config.step_tokens or 0 < config.decode_rows < len(running):
            return 0
        if any(seq.missing != 1 or seq.start < seq.prompt_len for seq in running):
            return 0
        if any(work.count != 1 for plan in self.engine.launched for work in plan.work):
            return 0
        steps = min(seq.request.limit - seq.known for seq in running) - 1
        if steps < LEAST_STRIDE:
            return 0
        need = 0
        for seq in running:
            assert seq.state is not None
            for group, table in zip(state.layout.paged, seq.state.tables, strict=True):
                need += max(0, -(-(seq.start + steps) // group.page_tokens) - len(table))
        return steps if need <= state.pages.available else 0

    def _plain_seconds(self, running: Sequence[Running], steps: int, until: float) -> list[float]:
        """Times of at most so many steps, as far as they end before `until`."""
        times, now = list[float](), self.clock.now
        work = [Work(seq.row, seq.start, 1, sample=True) for seq in running]
        for spent in islice(self.spec.times.decodes(work), steps):
            seconds = spent.seconds
            if now + seconds >= until:
                break
            self.spent.add(spent)
            times.append(seconds)
            now += seconds
        return times

    def _wait(self, time: float) -> bool:
        """Move the clock to the next event of an engine whose batch is incomplete; False if it is after `time`."""
        events = [self._requests[self._coming[0]].arrived] if self._coming else []
        wake = self.engine.wake_at()
        events += [] if wake is None else [wake]
        if not events and time == float("inf"):
            self.scheduler.sealed = True  # nothing will arrive: the last batch stays incomplete
            return True
        if not events or min(events) >= time:
            return False
        self.clock.now = max(self.clock.now, min(events))
        self._take_in()
        return True

    def _take_in(self) -> None:
        while self._coming and self._requests[self._coming[0]].arrived <= self.clock.now:
            number = self._coming.popleft()
            arrival = self._trace[number]
            limit = len(arrival.prompt) + arrival.output
            try:
                self.engine.add(Request(number, arrival.prompt, limit))
            except RequestError:
                self._requests[number].refused = True
                insort(self._ends, self.clock.now)

    def _receive(self, output: Output) -> None:
        number, ended = cast(int, output.request), output.finish is not None
        served = self._requests[number]
        served.receive(self.clock.now, len(output.tokens), ended)
        served.cached, served.blocked = output.cached, output.blocked
        self.engine.started.pop(number, None)
        if ended:
            insort(self._ends, self.clock.now)

    def _note(self, plan: StepPlan) -> None:
        pages = self.manager.pages
        self.most_pages = max(self.most_pages, pages.size - pages.available)
        self.sequences += len(plan.work)
        self.most_rows = max(self.most_rows, self.scheduler.running)
        self.most_tokens = max(self.most_tokens, plan.tokens)
        self.full_rows += self.scheduler.running == self.spec.sizes.rows and self.scheduler.waiting > 0


@dataclass(slots=True)
class Run:
    """Result of a simulated trace."""

    requests: list[RequestTimes]
    spent: TimeBreakdown
    seconds: float
    """Time from the first arrival to the last token."""
    busy: float
    """Fraction of device time inside steps."""
    mean_batch: float
    most_pages: int
    """Peak pages of one replica."""
    preemptions: int
    full_rows: float
    """Fraction of the steps with all rows taken while requests waited."""
    most_rows: int
    most_tokens: int
    """Peak tokens of one step."""
    finished: list[RequestTimes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.finished = [served for served in self.requests if served.done]

    @property
    def piling_up(self) -> float:
        """Growth of the backlog during the second half of the trace, relative to the arrivals in it."""
        begun, ended = self.requests[0].arrived, self.requests[-1].arrived
        middle = (begun + ended) / 2
        late = sum(served.arrived > middle for served in self.requests)
        return (self._under_way(ended) - self._under_way(middle)) / max(late, 1)

    def _under_way(self, time: float) -> int:
        """Requests in the system; rejected ones count as never leaving."""
        gone = sum(served.last is not None and served.last <= time for served in self.requests)
        return sum(served.arrived <= time for served in self.requests) - gone


def simulate(
    spec: ReplicaSpec,
    trace: Sequence[TraceRequest],
    replicas: int = 1,
    routing: str = DEFAULT_POLICY,
    *,
    stepped: bool = False,
) -> Run:
    """Run a whole trace from an idle start to the last token. Several replicas are routed to by the server's policy.
    `stepped`: as for a `Replica`."""
    requests = [RequestTimes(a.time, len(a.prompt), a.output) for a in trace]
    fleet = [Replica(spec, requests, trace, stepped) for _ in range(replicas)]
    front = _front_of(spec, fleet, routing) if replicas > 1 else None
    for number, served in enumerate(requests):
        for replica in fleet:
            replica.run_until(served.arrived)
        chosen = 0
        if front is not None:
            routed = front.route(number, trace[number].prompt, resumed=True)
            assert routed is not None, "a replica refuses by itself"
            chosen = routed[0]
        if not fleet[chosen].assign(number) and front is not None:
            front.left(chosen, number)
    for replica in fleet:
        replica.run_until(float("inf"))
    return _joined(requests, fleet)


def _front_of(spec: ReplicaSpec, fleet: Sequence[Replica], routing: str) -> FleetFront:
    clock = Clock()
    facts = facts_of(spec.layout, spec.sizes.rows, fleet[0].manager.pages.size, spec.sched.step_tokens)
    front = FleetFront(facts, len(fleet), routing, 0, clock)

    def reports(number: int, replica: Replica) -> Callable[[list[Output]], None]:
        reporter = PrefixReporter(replica.manager, replica.clock)

        def report(outputs: list[Output]) -> None:
            clock.now = replica.clock.now
            prefixes = reporter.report(idle=not replica.engine.busy)
            front.receive(number, FleetStep(outputs, load_of(replica.engine, 0), prefixes))

        return report

    for number, replica in enumerate(fleet):
        replica.scheduler.pace.measured = True
        replica.on_step = reports(number, replica)
        front.starts(number)
    return front


def _joined(requests: list[RequestTimes], fleet: Sequence[Replica]) -> Run:
    spent = TimeBreakdown()
    for replica in fleet:
        spent.add(replica.spent)
    ends = [served.last for served in requests if served.last is not None]
    seconds = max(max(ends, default=0.0) - requests[0].arrived, 1e-9)
    busy = sum(replica.runner.busy for replica in fleet) / (seconds * len(fleet))
    return Run(
        requests,
        spent,
        seconds,
        min(busy, 1.0),
        sum(replica.sequences for replica in fleet) / max(spent.steps, 1),
        max(replica.most_pages for replica in fleet),
        sum(replica.scheduler.preemptions for replica in fleet),
        sum(replica.full_rows for replica in fleet) / max(spent.steps, 1),
        max(replica.most_rows for replica in fleet),
        max(replica.most_tokens for replica in fleet),
    )
