"""Prefill and decode on different engines: simulated one after the other, with the transfer of K/V between them.

A prefill engine runs each prompt to its first token. The state of the prompt then goes over the link, one prompt after
the other for each prefill engine, and a decode engine continues when all of it has arrived. Nothing is sent while the
prompt is still computed, which a real engine does: a prediction of this module errs on the slow side.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bankfull.errors import ConfigError
from bankfull.plan.simulate import ReplicaSpec, RequestTimes, Run, simulate
from bankfull.plan.step_times import TimeBreakdown
from bankfull.plan.traffic import TraceRequest

MOST_ENGINES = 256
RATIOS = ((1, 1), (2, 1), (1, 2), (3, 1), (1, 3))
"""Prefill and decode engines that `auto` tries."""


@dataclass(frozen=True, slots=True)
class PlannedPools:
    """Engines of a pair of pools."""

    prefill: int = 1
    decode: int = 1

    def __post_init__(self) -> None:
        for name in ("prefill", "decode"):
            if not 1 <= getattr(self, name) <= MOST_ENGINES:
                raise ConfigError(f"--separate: {name}={getattr(self, name)} must be from 1 to {MOST_ENGINES} engines.")

    @property
    def engines(self) -> int:
        return self.prefill + self.decode

    def __str__(self) -> str:
        return f"prefill={self.prefill},decode={self.decode}"

    @staticmethod
    def parse(text: str) -> PlannedPools:
        """Pools from `prefill=1,decode=2`."""
        pools: dict[str, int] = {}
        for part in text.split(","):
            match = re.fullmatch(r"\s*(prefill|decode)\s*=\s*([0-9]{1,6})\s*", part)
            if match is None or match[1] in pools:
                raise ConfigError(f"--separate {text[:60]!r} cannot be read; write for example prefill=1,decode=2.")
            pools[match[1]] = int(match[2])
        if len(pools) < 2:
            raise ConfigError(f"--separate {text[:60]!r} must name engines of both kinds: prefill=1,decode=2.")
        return PlannedPools(**pools)


@dataclass(frozen=True, slots=True)
class SeparatedSpec:
    prefill: ReplicaSpec
    decode: ReplicaSpec
    engines: PlannedPools
    transfer: Callable[[int], float]
    """Seconds to send the state of this many tokens."""


def simulate_separated(spec: SeparatedSpec, trace: Sequence[TraceRequest], routing: str) -> Run:
    first = simulate(spec.prefill, [replace(one, output=1) for one in trace], spec.engines.prefill, routing)
    arrivals = _transferred(spec, trace, first)
    order = sorted(arrivals, key=lambda number: arrivals[number])
    requests = [replace(one, output=asked.output) for one, asked in zip(first.requests, trace, strict=True)]
    if not order:
        return replace(first, requests=requests)
    rest = [_continued(trace[number], arrivals[number]) for number in order]
    widest = max(len(one.prompt) for one in rest) * spec.decode.sizes.rows
    decode = replace(
        spec.decode,
        received=True,
        sched=replace(spec.decode.sched, step_tokens=max(widest, spec.decode.sched.step_tokens)),
    )
    second = simulate(decode, rest, spec.engines.decode, routing)
    for number, served in zip(order, second.requests, strict=True):
        _join(requests[number], served)
    return _joined(spec, requests, first, second)


def _transferred(spec: SeparatedSpec, trace: Sequence[TraceRequest], first: Run) -> dict[int, float]:
    """When the state of each request that goes on has arrived. Prompts share the links of the prefill engines."""
    free = [0.0] * spec.engines.prefill
    arrived: dict[int, float] = {}
    done = [n for n, one in enumerate(first.requests) if one.done and trace[n].output > 1]
    for number in sorted(done, key=lambda n: first.requests[n].first or 0.0):
        link = min(range(len(free)), key=lambda i: free[i])
        free[link] = max(free[link], first.requests[number].first or 0.0) + spec.transfer(len(trace[number].prompt))
        arrived[number] = free[link]
    return arrived


def _continued(asked: TraceRequest, at: float) -> TraceRequest:
    """What the decode engine runs: the prompt with its first token, and the other tokens."""
    return replace(asked, time=at, prompt=(*asked.prompt, 0), output=asked.output - 1)


def _join(request: RequestTimes, rest: RequestTimes) -> None:
    request.refused = rest.refused
    request.last = rest.last
    request.tokens += rest.tokens
    request.cached, request.blocked = max(request.cached, rest.cached), request.blocked + rest.blocked
    if rest.first is not None and request.first is not None:
        request.longest_gap = max(rest.longest_gap, rest.first - request.first)
        request.newest = rest.newest


def _joined(spec: SeparatedSpec, requests: list[RequestTimes], first: Run, second: Run) -> Run:
    spent = TimeBreakdown()
    for run in (first, second):
        spent.add(run.spent)
    ends = [one.last for one in requests if one.last is not None]
    seconds = max(max(ends, default=0.0) - requests[0].arrived, 1e-9)
    busy = first.busy * first.seconds * spec.engines.prefill + second.busy * second.seconds * spec.engines.decode
    steps = max(spent.steps, 1)
    weighted = [(one, one.spent.steps / steps) for one in (first, second)]
    return Run(
        requests,
        spent,
        seconds,
        min(busy / (seconds * spec.engines.engines), 1.0),
        sum(run.mean_batch * share for run, share in weighted),
        max(first.most_pages, second.most_pages),
        first.preemptions + second.preemptions,
        sum(run.full_rows * share for run, share in weighted),
        max(first.most_rows, second.most_rows),
        first.most_tokens,
    )
