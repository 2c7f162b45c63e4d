"""Routing policies compared on simulated replicas: python -m benchmarks.routing --help

Every replica runs the real engine loop, scheduler, prefix cache and reports (`Gauge`, `PrefixReporter`) on a device
that only models time. The front is the real one too: `HeldPrefixes`, `ReplicaMeter` and the policies, which learn of a
step when it ends. "one cache" is a single replica with the pages, rows and speed of all of them together: no routing
could reach more.
"""

from __future__ import annotations

import argparse
import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from statistics import median
from typing import cast

from bankfull.config import SchedConfig, StateConfig
from bankfull.decode.plain import Plain
from bankfull.engine import Engine
from bankfull.fleet.meter import ReplicaMeter
from bankfull.fleet.prefix_report import PrefixReporter
from bankfull.fleet.prefixes import HeldPrefixes, PromptKeys
from bankfull.fleet.routing import POLICIES, routing_policy
from bankfull.plan.fake_runner import Clock, FakeRunner
from bankfull.sched.scheduler import Scheduler
from bankfull.serve.engine.wire import Facts, Load, PrefixChanges
from bankfull.serve.engine.worker import STEP_MS, Gauge
from bankfull.state.manager import StateManager
from bankfull.state.spec import Paged, TensorSpec, layout_of
from bankfull.types import Output, Request, Work

PAGE_TOKENS = 16
LAYOUT = layout_of([(Paged((TensorSpec("k", (1, 4), "float32"),)),)], PAGE_TOKENS)
ONE_CACHE = "one cache"
VOCABULARY = 50_000


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """Seconds of a step: a fixed part (the weights are read once), and one for each prompt token and decoding row."""

    step: float = 0.010
    token: float = 0.0002
    row: float = 0.0002
    factor: float = 1.0

    def seconds(self, work: Sequence[Work]) -> float:
        parts = (self.row if one.count == 1 else self.token * one.count for one in work)
        return (self.step + sum(parts)) / self.factor


@dataclass(frozen=True, slots=True)
class ReplicaSize:
    pages: int = 1024
    rows: int = 16
    step_tokens: int = 512
    speed: DeviceSpeed = field(default_factory=DeviceSpeed)

    def times(self, replicas: int) -> ReplicaSize:
        """One replica as large and as fast as this many."""
        speed = DeviceSpeed(self.speed.step, self.speed.token, self.speed.row, replicas * self.speed.factor)
        return ReplicaSize(self.pages * replicas, self.rows * replicas, self.step_tokens * replicas, speed)


@dataclass(slots=True)
class Turn:
    """One request of a session: its prompt is the whole conversation so far."""

    session: int
    prompt: tuple[int, ...]
    output: int
    arrived: float
    replica: int = -1
    predicted: int = 0
    """Tokens that the front expected to be cached."""
    cached: int = 0
    first: float | None = None
    ended: float | None = None


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation: each turn adds new tokens to all before, after a pause."""

    begins: float
    opening: tuple[int, ...]
    turns: tuple[tuple[float, tuple[int, ...], int], ...]
    """Per turn: seconds of pause before it, new tokens, output tokens."""


@dataclass(frozen=True, slots=True)
class Report:
    """What one step told the front."""

    time: float
    load: Load
    prefixes: PrefixChanges | None
    outputs: list[Output]


class SimulatedReplica:
    def __init__(self, size: ReplicaSize) -> None:
        self.clock = Clock()
        self.state = StateManager(LAYOUT, size.pages, 0, StateConfig(page_tokens=PAGE_TOKENS))
        config = SchedConfig(rows=size.rows, step_tokens=size.step_tokens, step_ms=STEP_MS, policy="priority")
        self.runner = FakeRunner(self.clock, size.speed.seconds)
        scheduler = Scheduler(config, self.state, clock=self.clock)
        self.engine = Engine(scheduler, self.runner, Plain(), 0, clock=self.clock)
        self.gauge = Gauge(self.engine, None, paced=True)
        self.reporter = PrefixReporter(self.state, self.clock)
        self.facts = Facts("", 1 << 20, VOCABULARY, size.rows, size.pages, PAGE_TOKENS, size.step_tokens, "", "")
        self.inbox: deque[tuple[float, int, Turn]] = deque()
        self.outbox: deque[Report] = deque()

    @property
    def starts(self) -> float:
        """Time at which its next step can begin; infinite without work."""
        if self.engine.busy:
            return self.clock.now
        return max(self.clock.now, self.inbox[0][0]) if self.inbox else float("inf")

    def step(self) -> None:
        self.clock.now = self.starts
        while self.inbox and self.inbox[0][0] <= self.clock.now:
            _, number, turn = self.inbox.popleft()
            self.gauge.queued(number, len(turn.prompt))
            self.engine.add(Request(number, turn.prompt, len(turn.prompt) + turn.output))
        outputs = self.engine.step()
        for output in outputs:
            self.engine.started.pop(output.request, None)
        prefixes = self.reporter.report(idle=not self.engine.busy)
        self.outbox.append(Report(self.clock.now, self.gauge.load(), prefixes, outputs))


class SimulatedFront:
    """Routes as the real front does, with what replicas have reported up to now."""

    def __init__(self, replicas: Sequence[SimulatedReplica], policy: str) -> None:
        self.now = 0.0
        self._replicas = replicas
        self._policy = routing_policy(policy)
        self.held = [HeldPrefixes(replica.facts) for replica in replicas]
        self._meters = [ReplicaMeter(lambda: self.now) for _ in replicas]
        for meter, replica in zip(self._meters, replicas, strict=True):
            meter.started(replica.facts)

    def send(self, number: int, turn: Turn) -> None:
        keys = PromptKeys(turn.prompt, "", PAGE_TOKENS)
        cached = [held.cached_tokens(keys) for held in self.held]
        candidates = [meter.candidate(tokens) for meter, tokens in zip(self._meters, cached, strict=True)]
        turn.replica = self._policy.choose(len(turn.prompt), False, candidates)
        turn.predicted = cached[turn.replica]
        self._meters[turn.replica].sent(number, len(turn.prompt), turn.predicted)
        self._replicas[turn.replica].inbox.append((self.now, number, turn))

    def receive(self, replica: int, report: Report) -> None:
        meter = self._meters[replica]
        meter.report(report.load)
        if report.prefixes is not None:
            self.held[replica].apply(report.prefixes)
        for output in report.outputs:
            meter.answered(output.request)
            if output.finish is not None:
                meter.ended(output.request)


@dataclass(slots=True)
class Outcome:
    """The result of one simulated run."""

    turns: list[Turn]
    replicas: int
    held: list[set[int]]
    """Per replica, the keys that its cache held at the end."""

    @property
    def hit_rate(self) -> float:
        """Cached fraction of all prompt tokens."""
        return sum(turn.cached for turn in self.turns) / sum(len(turn.prompt) for turn in self.turns)

    @property
    def ttfts(self) -> list[float]:
        return sorted(turn.first - turn.arrived for turn in self.turns if turn.first is not None)

    @property
    def median_ttft(self) -> float:
        return median(self.ttfts)

    @property
    def late_ttft(self) -> float:
        """99th percentile."""
        return self.ttfts[int(0.99 * (len(self.ttfts) - 1))]

    @property
    def seconds(self) -> float:
        return max(turn.ended or 0.0 for turn in self.turns)

    @property
    def shares(self) -> list[float]:
        """Fraction of the requests that each replica served."""
        served = [sum(turn.replica == number for turn in self.turns) for number in range(self.replicas)]
        return [each / len(self.turns) for each in served]


class Simulation:
    def __init__(self, sessions: Sequence[Session], policy: str, replicas: int, size: ReplicaSize) -> None:
        self._sessions = sessions
        self._replicas = [SimulatedReplica(size) for _ in range(replicas)]
        self._front = SimulatedFront(self._replicas, policy)
        self._arrivals: list[tuple[float, int, int, tuple[int, ...]]] = []
        """Time, session, number of the turn, prompt."""
        self.turns: dict[int, Turn] = {}
        self._place: dict[int, tuple[int, int]] = {}
        """Request number -> its session and turn."""
        self._texts: dict[int, list[int]] = {}
        self._numbers = count()

    def run(self) -> Outcome:
        for number, session in enumerate(self._sessions):
            pause, new, _ = session.turns[0]
            heapq.heappush(self._arrivals, (session.begins + pause, number, 0, session.opening + new))
        while True:
            arrival = self._arrivals[0][0] if self._arrivals else float("inf")
            replica = min(self._replicas, key=lambda replica: replica.starts)
            report = min((r.outbox[0].time for r in self._replicas if r.outbox), default=float("inf"))
            # In the order of time: a report that is out is received before anything that comes later.
            if min(report, arrival, replica.starts) == float("inf"):
                break
            if report <= min(arrival, replica.starts):
                self._receive(next(i for i, r in enumerate(self._replicas) if r.outbox and r.outbox[0].time == report))
            elif arrival <= replica.starts:
                self._arrive()
            else:
                replica.step()
        held = [set(front.keys) for front in self._front.held]
        return Outcome(list(self.turns.values()), len(self._replicas), held)

    def _arrive(self) -> None:
        time, session, turn, prompt = heapq.heappop(self._arrivals)
        number = next(self._numbers)
        self._place[number] = session, turn
        self._texts[number] = []
        self.turns[number] = Turn(session, prompt, self._sessions[session].turns[turn][2], time)
        self._front.now = time
        self._front.send(number, self.turns[number])

    def _receive(self, replica: int) -> None:
        report = self._replicas[replica].outbox.popleft()
        self._front.now = report.time
        self._front.receive(replica, report)
        for output in report.outputs:
            number = cast(int, output.request)
            turn = self.turns[number]
            self._texts[number] += output.tokens
            if turn.first is None and output.tokens:
                turn.first, turn.cached = report.time, output.cached
            if output.finish is not None:
                turn.ended = report.time
                self._continue(number, turn)

    def _continue(self, number: int, turn: Turn) -> None:
        session, last = self._place.pop(number)
        text = self._texts.pop(number)
        turns = self._sessions[session].turns
        if last + 1 < len(turns):
            pause, new, _ = turns[last + 1]
            arrival = cast(float, turn.ended) + pause, session, last + 1, (*turn.prompt, *text, *new)
            heapq.heappush(self._arrivals, arrival)


def compare(
    sessions: Sequence[Session], policies: Sequence[str], replicas: int = 4, size: ReplicaSize | None = None
) -> dict[str, Outcome]:
    """Each policy on the same traffic; ONE_CACHE: a single replica as large and fast as all."""
    found, size = {}, size or ReplicaSize()
    for policy in policies:
        if policy == ONE_CACHE:
            found[policy] = Simulation(sessions, "round-robin", 1, size.times(replicas)).run()
        else:
            found[policy] = Simulation(sessions, policy, replicas, size).run()
    return found


# -- traffic


def _tokens(random: Random, least: int, most: int) -> tuple[int, ...]:
    return tuple(random.choices(range(VOCABULARY), k=random.randint(least, most)))


def _session(random: Random, begins: float, opening: tuple[int, ...], turns: int, pause: float, output: int) -> Session:
    pauses = [random.expovariate(1 / pause) if turn else 0.0 for turn in range(turns)]
    steps = tuple((each, _tokens(random, 40, 120), random.randint(output // 2, output)) for each in pauses)
    return Session(begins, opening, steps)


def multi_turn(sessions: int = 120, seed: int = 0) -> list[Session]:
    """Conversations of several turns, each with its own documents at the start. Together they need a little more than
    all pages."""
    random = Random(f"multi-turn/{seed}")
    return [
        _session(random, random.uniform(0, 0.6 * sessions), _tokens(random, 300, 900), random.randint(6, 12), 4.0, 24)
        for _ in range(sessions)
    ]


def skewed(sessions: int = 160, seed: int = 0) -> list[Session]:
    """One conversation in five is six times as long and as active as the others."""
    random = Random(f"skewed/{seed}")
    found = []
    for number in range(sessions):
        begins, heavy = random.uniform(0, 0.4 * sessions), number % 5 == 0
        opening = _tokens(random, 1800, 3600) if heavy else _tokens(random, 100, 400)
        found.append(_session(random, begins, opening, 12 if heavy else 4, 1.0 if heavy else 6.0, 24))
    return found


def hot_prefix(sessions: int = 400, seed: int = 0) -> list[Session]:
    """Single requests that all share one long system prompt."""
    random = Random(f"hot prefix/{seed}")
    system = _tokens(random, 2000, 2000)
    return [_session(random, random.uniform(0, 0.05 * sessions), system, 1, 1.0, 48) for _ in range(sessions)]


TRAFFIC: dict[str, Callable[..., list[Session]]] = {
    "multi-turn": multi_turn,
    "skewed": skewed,
    "hot-prefix": hot_prefix,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing", description="Compare routing policies.")
    parser.add_argument("--replicas", type=int, default=4, help="replicas (default: 4)")
    parser.add_argument("--pages", type=int, default=1024, help="pages of 16 tokens per replica (default: 1024)")
    parser.add_argument("--traffic", choices=TRAFFIC, action="append", help="traffic; may be repeated (default: all)")
    parser.add_argument("--sessions", type=int, help="conversations (default: the traffic's own)")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    for name in asked.traffic or TRAFFIC:
        sessions = TRAFFIC[name](**({"sessions": asked.sessions} if asked.sessions else {}), seed=asked.seed)
        requests = sum(len(session.turns) for session in sessions)
        print(f"\n{name}: {len(sessions)} conversations, {requests} requests, {asked.replicas} replicas")
        print(f"{'policy':>14} {'hit rate':>9} {'TTFT p50':>10} {'p99':>10} {'seconds':>9}  requests per replica")
        for policy, run in compare(sessions, (ONE_CACHE, *POLICIES), asked.replicas, ReplicaSize(asked.pages)).items():
            shares = " ".join(f"{share:4.0%}" for share in run.shares)
            times = f"{1e3 * run.median_ttft:7.1f} ms {1e3 * run.late_ttft:7.1f} ms {run.seconds:9.1f}"
            print(f"{policy:>14} {run.hit_rate:9.1%} {times}  {shares}")


if __name__ == "__main__":
    main()
