"""Runs the recommendation on this machine in real time, and compares it with the prediction for the same requests."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from bankfull.assembly import assemble
from bankfull.config import StateConfig
from bankfull.engine import Engine
from bankfull.errors import ConfigError
from bankfull.limits.statistics import quantile
from bankfull.plan.configurations import Configuration
from bankfull.plan.outcome import Objectives, SimulatedOutcome, outcome_of
from bankfull.plan.simulate import RequestTimes, simulate
from bankfull.plan.step_timer import GREEDY
from bankfull.plan.traffic import TraceRequest, TrafficSpec
from bankfull.runtime.device import open_device
from bankfull.runtime.rows import Job
from bankfull.types import Request

LONGEST_SLEEP = 0.01
WARM_TOKENS, WARM_STEPS = 32, 4
Advance = Callable[[int, str], None]


@dataclass(frozen=True, slots=True)
class PredictionCheck:
    figure: str
    predicted: float
    measured: float
    limit: float | None = None
    """Physical limit of the figure, if it has one."""

    @property
    def error(self) -> float | None:
        """Error of the prediction relative to the measurement."""
        return self.predicted / self.measured - 1 if self.measured else None

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "error": self.error}


def verify(
    outcome: SimulatedOutcome,
    traffic: TrafficSpec,
    objectives: Objectives,
    requests: int,
    seed: int,
    advance: Advance = lambda done, note: None,
) -> list[PredictionCheck]:
    configuration = outcome.configuration
    if not configuration.site.here:
        raise ConfigError(
            f"--verify runs the recommendation on this machine, but it is for {configuration.site.name}; leave "
            "--devices out, or give only cpu or cuda."
        )
    vocab = configuration.prepared.metered.model.vocab
    trace = traffic.trace(requests, vocab, seed)
    run = simulate(configuration.replica(traffic.longest), trace, configuration.replicas, configuration.route)
    predicted = outcome_of(configuration, run, traffic, objectives)
    measured = replay(_engine(configuration), trace, configuration.rows, advance)
    return compared(predicted, run.requests, measured, traffic, objectives)


def _engine(configuration: Configuration) -> Engine:
    recipe = configuration.prepared.recipe
    sched = replace(configuration.scheduling, rows=configuration.rows, step_tokens=configuration.step_tokens)
    device = open_device(configuration.site.name)
    return assemble(recipe.files, recipe.run, sched, StateConfig(), device=device).engine


def replay(
    engine: Engine,
    trace: Sequence[TraceRequest],
    rows: int,
    advance: Advance = lambda done, note: None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> list[RequestTimes]:
    """Submit requests at their arrival times, whether or not the engine keeps up; latency counts from these times."""
    _warm(engine, trace[0])
    requests = [RequestTimes(arrival.time, len(arrival.prompt), arrival.output) for arrival in trace]
    coming = deque(range(len(trace)))
    begun, ended = clock(), 0
    while coming or engine.busy:
        now = clock() - begun
        while coming and trace[coming[0]].time <= now:
            number = coming.popleft()
            if engine.scheduler.unfinished >= 2 * rows:
                requests[number].refused = True
                continue
            arrival = trace[number]
            limit = len(arrival.prompt) + arrival.output
            engine.add(Request(number, arrival.prompt, limit, payload=Job(GREEDY, 0)))
        if not engine.busy:
            if coming:
                sleep(max(0.0, min(trace[coming[0]].time - now, LONGEST_SLEEP)))
            continue
        if engine.scheduler.stuck:  # an incomplete batch: it is due at a time, or with an arrival
            engine.scheduler.sealed = not coming
            sleep(LONGEST_SLEEP if coming else 0.0)
        outputs = engine.step()
        now = clock() - begun
        for output in outputs:
            served = requests[cast(int, output.request)]
            served.receive(now, len(output.tokens), output.finish is not None)
            ended += output.finish is not None
        advance(ended, "in real time")
    return requests


def _warm(engine: Engine, arrival: TraceRequest) -> None:
    """Warm-up: the first steps create one-time layouts."""
    prompt = arrival.prompt[:WARM_TOKENS]
    engine.add(Request("warm", prompt, len(prompt) + WARM_STEPS, salt=b"warm", payload=Job(GREEDY, 0)))
    while engine.busy:
        engine.step()


def compared(
    predicted: SimulatedOutcome,
    simulated: Sequence[RequestTimes],
    measured: Sequence[RequestTimes],
    traffic: TrafficSpec,
    objectives: Objectives,
) -> list[PredictionCheck]:
    checks = []
    both = (simulated, measured)
    limits = {"ttft": 1e3 * predicted.ttft_least, "tpot": 1e3 * predicted.tpot_least}
    for name in ("ttft", "tpot", "e2e"):
        for label, share in (("median", 0.5), ("p99", 0.99)):
            one, other = (_figure(requests, name, share) for requests in both)
            checks.append(PredictionCheck(f"{name} {label}, ms", one, other, limits.get(name)))
    one, other = map(_tokens_per_s, both)
    checks.append(PredictionCheck("output tokens/s", one, other))
    one, other = (traffic.rate * sum(map(objectives.met, requests)) / len(requests) for requests in both)
    checks.append(PredictionCheck("goodput, requests/s", one, other, traffic.rate))
    return checks


def _figure(requests: Sequence[RequestTimes], name: str, share: float) -> float:
    values = sorted(1e3 * getattr(served, name) for served in requests if served.done)
    return quantile(values, share) if values else float("inf")


def _tokens_per_s(requests: Sequence[RequestTimes]) -> float:
    ends = [served.last for served in requests if served.last is not None]
    return sum(served.tokens for served in requests if served.done) / max(max(ends, default=0.0), 1e-9)
