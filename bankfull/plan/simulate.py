"""Simulates the requests of a trace on one configuration, on one replica or on several."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import cast

from bankfull.config import SchedConfig, StateConfig
from bankfull.errors import ConfigError, RequestError
from bankfull.fleet.prefix_report import PrefixReporter
from bankfull.fleet.routing import DEFAULT_POLICY
from bankfull.plan.engine import SimulatedEngine
from bankfull.plan.fake_runner import Clock, some_token
from bankfull.plan.fleet_front import FleetFront, FleetStep, facts_of, load_of
from bankfull.plan.step_times import StepTimes, TimeBreakdown
from bankfull.plan.stride import Ends
from bankfull.plan.traffic import TraceRequest
from bankfull.runtime.memory import Sizes
from bankfull.sched.canvas import Canvas
from bankfull.sched.sequence import Sequence as Running
from bankfull.state.manager import StateManager
from bankfull.state.spec import Layout
from bankfull.types import CanvasShape, Output, Request, StepPlan, Work

MOST_STEPS = 2_000_000


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


class Replica(SimulatedEngine):
    def __init__(
        self,
        spec: ReplicaSpec,
        requests: Sequence[RequestTimes],
        trace: Sequence[TraceRequest],
        stepped: bool = False,
    ) -> None:
        self.spec, self._requests, self._trace = spec, requests, trace
        self.spent, self.busy = TimeBreakdown(), 0.0
        # Pages beyond those that all requests fill, plus one per running request, are never used.
        # The last block of a diffusion model may end beyond the request.
        beyond = 0 if spec.canvas is None else min(spec.canvas.length, spec.sizes.max_len)
        total = sum(-(-(len(a.prompt) + a.output + beyond) // g.page_tokens) for a in trace for g in spec.layout.paged)
        state = StateManager(spec.layout, min(spec.sizes.frames, total + spec.sizes.rows), spec.sizes.slots, spec.state)
        canvas = None if spec.canvas is None else Canvas(spec.canvas, spec.sizes.max_len)
        sched = replace(spec.sched, rows=spec.sizes.rows)
        super().__init__(sched, state, some_token, depth=spec.depth, canvas=canvas, stepped=stepped)
        self.engine.on_launch.append(self._note)
        self.on_step: Callable[[list[Output]], None] | None = None
        """Called with the outputs of each step."""
        self._plain: list[TimeBreakdown] = []
        """Times of the plain steps that were planned last."""
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
        self.coming.append((time, number))
        return True

    def run_until(self, time: float) -> None:
        for _ in range(MOST_STEPS):
            if not self.proceed(time):
                return
        raise ConfigError(
            f"The simulation of this traffic did not end within {MOST_STEPS} steps; give fewer or shorter requests."
        )

    def step_seconds(self, work: Sequence[Work]) -> float:
        seconds = self.spec.seconds(work, self.spent)
        self.busy += seconds
        return seconds

    def plain_ends(self, running: Sequence[Running], most: int, until: float) -> Ends:
        now, self._plain = self.clock.now, []
        ends = list[float]()
        for spent in self.spec.times.decodes([Work(seq.row, seq.start, 1, sample=True) for seq in running]):
            now += spent.seconds
            self._plain.append(spent)
            ends.append(now)
            if len(ends) == most or now >= until:
                break
        return ends

    def arrive(self, number: int) -> None:
        arrival = self._trace[number]
        try:
            self.engine.add(Request(number, arrival.prompt, len(arrival.prompt) + arrival.output))
        except RequestError:
            self._requests[number].refused = True
            insort(self._ends, self.clock.now)

    def receive(self, outputs: list[Output]) -> None:
        if self.on_step is not None:
            self.on_step(outputs)
        for output in outputs:
            number, ended = cast(int, output.request), output.finish is not None
            served = self._requests[number]
            served.receive(self.clock.now, len(output.tokens), ended)
            served.cached, served.blocked = output.cached, output.blocked
            self.engine.started.pop(number, None)
            if ended:
                insort(self._ends, self.clock.now)

    def decoded(self, running: Sequence[Running], begun: float, ends: Ends) -> None:
        for spent in self._plain[: len(ends)]:
            self.spent.add(spent)
            self.busy += spent.seconds
        self._count(len(ends), len(running))
        longest = max([end - start for start, end in pairwise(ends)], default=0.0)
        for seq in running:
            served = self._requests[cast(int, seq.request.id)]
            served.tokens += len(ends)
            served.longest_gap = max(served.longest_gap, ends[0] - served.newest, longest)
            served.newest = ends[-1]

    def _note(self, plan: StepPlan) -> None:
        self._count(1, len(plan.work))
        self.most_rows = max(self.most_rows, self.scheduler.running)
        self.most_tokens = max(self.most_tokens, plan.tokens)

    def _count(self, steps: int, sequences: int) -> None:
        """Steps that have places for their tokens, each of so many sequences."""
        pages = self.state.pages
        self.most_pages = max(self.most_pages, pages.size - pages.available)
        self.sequences += steps * sequences
        self.full_rows += steps * (self.scheduler.running == self.spec.sizes.rows and self.scheduler.waiting > 0)


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
        replica.check()
    return _joined(requests, fleet)


def _front_of(spec: ReplicaSpec, fleet: Sequence[Replica], routing: str) -> FleetFront:
    clock = Clock()
    facts = facts_of(spec.layout, spec.sizes.rows, fleet[0].state.pages.size, spec.sched.step_tokens)
    front = FleetFront(facts, len(fleet), routing, 0, clock)

    def reports(number: int, replica: Replica) -> Callable[[list[Output]], None]:
        reporter = PrefixReporter(replica.state, replica.clock)

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
    busy = sum(replica.busy for replica in fleet) / (seconds * len(fleet))
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
