"""Requests through the engine's own loop, scheduler and state, on a device that only tells how long it takes.

Nothing of the schedule is modelled: `Engine`, `Scheduler` and `StateManager` are the real ones, and a test holds that
their plans are those of an engine that computes. What is modelled is the time of a step.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from bankfull.config import SchedConfig, StateConfig
from bankfull.decode.plain import Plain
from bankfull.engine import Engine
from bankfull.errors import ConfigError, RequestError
from bankfull.plan.step_times import Spent, StepTimes
from bankfull.plan.traffic import Arrival
from bankfull.runtime.memory import Sizes
from bankfull.sched.scheduler import Scheduler
from bankfull.state.manager import StateManager
from bankfull.state.spec import Layout
from bankfull.types import Request, StepPlan, StepResult, Work

ROUTES = ("round-robin", "least-loaded")
MOST_STEPS = 2_000_000

StepSeconds = Callable[[Sequence[Work]], float]
Tokens = Callable[[int, int], int]
"""The token that a request (by number) gets at a position."""


def some_token(request: int, position: int) -> int:
    """Another one for each request, so that no two answers share pages."""
    return (request * 1_000_003 + position * 7919) & 0x7FFFFFFF


@dataclass(slots=True)
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class FakeStep:
    """A future of a step's result. Waiting for it moves the clock to the step's end."""

    plan: StepPlan
    clock: Clock
    ends: float
    """Seconds on the clock."""
    tokens: list[list[int]]

    def wait(self) -> StepResult:
        self.clock.now = max(self.clock.now, self.ends)
        completed = [transfer.id for transfer in self.plan.transfers]
        return StepResult(self.plan.step, self.tokens, [None] * len(self.tokens), completed=completed)


class FakeRunner:
    """A `Runner` that only models time. A step begins when the device is free, and ends after its seconds."""

    def __init__(self, clock: Clock, seconds: StepSeconds, token: Tokens = some_token) -> None:
        self._clock, self._seconds, self._token = clock, seconds, token
        self._free_at = 0.0
        self._request: dict[int, Any] = {}
        self._known: dict[int, int] = {}
        """By row: whose it is, and how many tokens are known."""
        self.busy = 0.0

    def forward(self, plan: StepPlan) -> FakeStep:
        for enter in plan.enter:
            self._request[enter.row] = enter.request
            self._known[enter.row] = len(enter.tokens)
        seconds = self._seconds(plan.work) if plan.work else 0.0
        self.busy += seconds
        self._free_at = max(self._clock.now, self._free_at) + seconds
        # The tokens are fixed at launch: another sequence may enter a row before the step settles.
        tokens = [self._next(w.row) if w.sample else [] for w in plan.work]
        return FakeStep(plan, self._clock, self._free_at, tokens)

    def finish(self, step: FakeStep, masks: Mapping[int, Any]) -> None:
        """The tokens are known already."""

    def _next(self, row: int) -> list[int]:
        position = self._known[row]
        self._known[row] = position + 1
        return [self._token(self._request[row], position)]


@dataclass(slots=True)
class Served:
    """One request, with the times at which it came, got its first and its last token."""

    arrived: float
    prompt: int
    output: int
    first: float | None = None
    last: float | None = None
    tokens: int = 0
    newest: float = 0.0
    """When the newest token came."""
    longest_gap: float = 0.0
    """Between two tokens."""
    cached: int = 0
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
        """Did it get its tokens?"""
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
    """One engine, as it would be configured."""

    layout: Layout
    sizes: Sizes
    sched: SchedConfig
    state: StateConfig
    depth: int
    times: StepTimes
    queue: int | None = None
    """Requests that may wait beyond those that run, as `serve` has it; None = as many again as there are rows."""


class Replica:
    def __init__(self, spec: ReplicaSpec, requests: Sequence[Served], trace: Sequence[Arrival]) -> None:
        self.spec, self._requests, self._trace = spec, requests, trace
        self.clock, self.spent = Clock(), Spent()
        # Pages beyond those that all requests fill, and one for each that runs, are never asked for.
        total = sum(-(-(len(a.prompt) + a.output) // g.page_tokens) for a in trace for g in spec.layout.paged)
        frames = min(spec.sizes.frames, total + spec.sizes.rows)
        sched = SchedConfig(
            rows=spec.sizes.rows,
            step_tokens=spec.sched.step_tokens,
            step_ms=spec.sched.step_ms,
            policy=spec.sched.policy,
            batching=spec.sched.batching,
            batch_size=spec.sched.batch_size,
            batch_delay=spec.sched.batch_delay,
        )
        self.manager = StateManager(spec.layout, frames, spec.sizes.slots, spec.state)
        self.scheduler = Scheduler(sched, self.manager, clock=self.clock)
        self.runner = FakeRunner(self.clock, lambda work: spec.times.work(work, self.spent))
        self.engine = Engine(self.scheduler, self.runner, Plain(), spec.depth, clock=self.clock)
        self.engine.on_launch.append(self._note)
        self._coming: deque[int] = deque()
        self._ends: list[float] = []
        self._assigned = 0
        self._most = sched.rows + (sched.rows if spec.queue is None else spec.queue)
        self.most_pages = 0
        self.sequences = self.most_rows = self.most_tokens = 0
        """Summed over steps; and the most rows taken, and tokens computed, in one."""
        self.full_rows = 0
        """Steps that ran with every row taken."""

    def load(self, time: float) -> int:
        """Requests that came and had not ended at this time."""
        return self._assigned - bisect_right(self._ends, time)

    def assign(self, number: int) -> None:
        time = self._requests[number].arrived
        if self.load(time) >= self._most:
            self._requests[number].refused = True
            return
        self._assigned += 1
        self._coming.append(number)

    def run_until(self, time: float) -> None:
        """Make every step that begins before this time."""
        for _ in range(MOST_STEPS):
            self._take_in()
            if not self.engine.busy:
                if not self._coming or (next_at := self._requests[self._coming[0]].arrived) >= time:
                    return
                self.clock.now = max(self.clock.now, next_at)
                continue
            if self.clock.now >= time:
                return
            before = self.engine.totals.steps
            outputs = self.engine.step()
            for output in outputs:
                self._receive(cast(int, output.request), len(output.tokens), output.finish is not None, output.cached)
            if not outputs and self.engine.totals.steps == before and not self.engine.busy:
                return
        raise ConfigError("The simulation of this traffic has no end: the requests need more steps than can be run.")

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

    def _receive(self, number: int, tokens: int, ended: bool, cached: int) -> None:
        served = self._requests[number]
        served.receive(self.clock.now, tokens, ended)
        served.cached = cached
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
    """What became of a trace."""

    requests: list[Served]
    spent: Spent
    seconds: float
    """From the first arrival to the last token."""
    busy: float
    """Of the devices' time, between 0 and 1."""
    mean_batch: float
    most_pages: int
    """Held at once by one replica."""
    preemptions: int
    full_rows: float
    """Share of the steps that ran with every row taken while requests waited."""
    most_rows: int
    most_tokens: int
    """In one step."""
    finished: list[Served] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.finished = [served for served in self.requests if served.done]

    @property
    def piling_up(self) -> float:
        """Of the requests that came in the second half of the trace: the part by which those under way have grown."""
        begun, ended = self.requests[0].arrived, self.requests[-1].arrived
        middle = (begun + ended) / 2
        late = sum(served.arrived > middle for served in self.requests)
        return (self._under_way(ended) - self._under_way(middle)) / max(late, 1)

    def _under_way(self, time: float) -> int:
        """Whoever was refused never leaves: it piles up, too."""
        gone = sum(served.last is not None and served.last <= time for served in self.requests)
        return sum(served.arrived <= time for served in self.requests) - gone


def simulate(spec: ReplicaSpec, trace: Sequence[Arrival], replicas: int = 1, route: str = ROUTES[0]) -> Run:
    """All of a trace, from an idle start to the last token."""
    requests = [Served(a.time, len(a.prompt), a.output) for a in trace]
    fleet = [Replica(spec, requests, trace) for _ in range(replicas)]
    for number, served in enumerate(requests):
        for replica in fleet:
            replica.run_until(served.arrived)
        if route == "round-robin":
            chosen = fleet[number % replicas]
        else:
            chosen = min(fleet, key=lambda replica: replica.load(served.arrived))
        chosen.assign(number)
    for replica in fleet:
        replica.run_until(float("inf"))
    return _joined(requests, fleet)


def _joined(requests: list[Served], fleet: Sequence[Replica]) -> Run:
    spent = Spent()
    for replica in fleet:
        spent.terms = spent.terms + replica.spent.terms
        for name in ("beside", "exchange", "least", "steps", "filling"):
            setattr(spent, name, getattr(spent, name) + getattr(replica.spent, name))
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
