"""Time lines of running and recently ended requests, beside the lower bound of the same steps.

The difference between two snapshots of the engine's counters gives the steps in between, and from the machine's
ceilings the shortest time for them. So a running request costs a few references and no work per token: its tokens are
summed here, and the trace gets the sum at the end.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from weakref import WeakSet

import msgspec

from bankfull.serve.engine.backend import Backend
from bankfull.serve.engine.wire import Load, RequestDone
from bankfull.serve.telemetry.trace import Trace

KEPT_REQUESTS = 200
"""Ended online requests that are kept; KEPT_BATCH_LINES limits batch lines separately, which would displace all
others."""
KEPT_BATCH_LINES = 50
SHOWN_ID = 64


class TimeLine(msgspec.Struct, kw_only=True):
    """One request as the console shows it. Times are in seconds; unknown values are null."""

    number: int
    """1-based number in the order of completion; 0 while it runs."""
    id: str
    key: str | None
    route: str
    batch: bool
    outcome: str
    """`waiting` or `running`; then the finish reason, or why the request failed."""
    arrived: float
    """Unix time of arrival."""
    seconds: float
    prepare: float
    """Time until the request was submitted to the engine: reading the body, template, tokenizing."""
    wait: float | None
    """Time in the engine until the first token, while its queueing time is not known yet."""
    queue: float | None
    prompt: float | None
    """Time from leaving the queue to the first token."""
    decode: float | None
    """Time from the first token to the last."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    first_token: float | None
    """Time to first token."""
    first_token_limit: float | None
    """Shortest possible time for the steps until the first token."""
    tokens_per_s: float | None
    """Tokens per second after the first token, for all samples together."""
    tokens_per_s_limit: float | None
    """Tokens per second if the same steps ran at the machine's limit."""


class OpenLine:
    """A running request. The counter of its steps holds the only reference, so a dropped request disappears."""

    __slots__ = (
        "__weakref__",
        "_arrived",
        "_first",
        "_first_load",
        "_first_tokens",
        "_load_before",
        "_submitted",
        "_time_lines",
        "batch",
        "finish",
        "prompt_tokens",
        "tokens",
        "trace",
    )

    def __init__(self, time_lines: TimeLines, trace: Trace, prompt_tokens: int, batch: bool) -> None:
        self._time_lines, self.trace, self.prompt_tokens, self.batch = time_lines, trace, prompt_tokens, batch
        self._submitted = time_lines.clock()
        self._arrived = time.time() - (self._submitted - trace.arrived)
        self._load_before = time_lines.backend.load
        self._first: float | None = None
        self._first_load: Load | None = None
        self._first_tokens = 0
        self.tokens = 0
        self.finish: str | None = None
        """Finish reason of the last sample that ended."""

    @property
    def key(self) -> str | None:
        return None if self.trace.key is None else self.trace.key.name

    def begin(self, tokens: int, now: float) -> None:
        """Record the first step with tokens; the caller adds the tokens of every step to `tokens`."""
        self._first, self._first_load, self._first_tokens = now, self._time_lines.backend.load, tokens

    def end(self, done: RequestDone) -> None:
        """Close the line after all samples have ended and all tokens were counted."""
        self._close(self.finish or "stop", done)

    def fail(self, reason: str) -> None:
        self._close(reason, None)

    def _close(self, outcome: str, done: RequestDone | None) -> None:
        self.trace.completion_tokens += self.tokens
        self._time_lines.close(self, self._line(outcome, done))

    def show(self) -> TimeLine:
        return self._line("waiting" if self._first is None else "running", None)

    def _line(self, outcome: str, done: RequestDone | None) -> TimeLine:
        now, load, trace = self._time_lines.clock(), self._time_lines.backend.load, self.trace
        first = now if self._first is None else self._first
        wait: float | None = first - self._submitted
        queue = prompt = decode = rate = rate_limit = first_limit = None
        if done is not None:
            queue = min(done.queue or 0.0, first - self._submitted)
            wait, prompt = None, first - self._submitted - queue
        if self._first is not None:
            decode, later = now - first, self.tokens - self._first_tokens
            first_limit, least = self._least(self._load_before, self._first_load), self._least(self._first_load, load)
            rate = later / decode if later and decode > 0 else None
            rate_limit = later / least if later and least else None
        return TimeLine(
            number=0,
            id=trace.id[:SHOWN_ID],
            key=self.key,
            route=trace.path[:200],
            batch=self.batch,
            outcome=outcome,
            arrived=self._arrived,
            seconds=now - trace.arrived,
            prepare=max(0.0, self._submitted - trace.arrived),
            wait=wait,
            queue=queue,
            prompt=prompt,
            decode=decode,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=0 if done is None else done.cached_tokens,
            output_tokens=self.tokens,
            first_token=None if self._first is None else first - trace.arrived,
            first_token_limit=first_limit,
            tokens_per_s=rate,
            tokens_per_s_limit=rate_limit,
        )

    def _least(self, before: Load | None, after: Load | None) -> float | None:
        facts = self._time_lines.backend.facts
        ceilings = None if facts is None else facts.ceilings
        return None if ceilings is None else least_seconds(before or NO_LOAD, after, ceilings)


class TimeLines:
    """The time lines of one server."""

    def __init__(self, backend: Backend, clock: Callable[[], float] = time.monotonic) -> None:
        self.backend, self.clock = backend, clock
        self._running: WeakSet[OpenLine] = WeakSet()
        self._ended: deque[TimeLine] = deque(maxlen=KEPT_REQUESTS)
        self._ended_batch_lines: deque[TimeLine] = deque(maxlen=KEPT_BATCH_LINES)
        self._numbers = count(1)

    def open(self, trace: Trace, prompt_tokens: int, *, batch: bool = False) -> OpenLine:
        line = OpenLine(self, trace, prompt_tokens, batch)
        self._running.add(line)
        return line

    def close(self, opened: OpenLine, line: TimeLine) -> None:
        """Keep `line` of a request that has ended."""
        self._running.discard(opened)
        line.number = next(self._numbers)
        (self._ended_batch_lines if line.batch else self._ended).append(line)

    def running(self) -> list[OpenLine]:
        """Online requests first, then batch lines, oldest first."""
        return sorted(self._running, key=lambda line: (line.batch, line.trace.arrived))

    def ended_after(self, number: int) -> Iterator[TimeLine]:
        for lines in (self._ended, self._ended_batch_lines):
            yield from (line for line in lines if line.number > number)


def least_seconds(before: Load, after: Load | None, ceilings: dict[str, float]) -> float | None:
    """The shortest time for the steps between two snapshots on this machine: decode steps and steps with prompt tokens,
    each limited by bandwidth or by compute. None if the engine restarted in between."""
    if after is None or after.steps < before.steps:
        return None
    decode_bytes = after.decode_bytes - before.decode_bytes
    decode_flops = after.decode_flops - before.decode_flops
    prompt_bytes = after.bytes_moved - before.bytes_moved - decode_bytes
    prompt_flops = after.flops - before.flops - decode_flops
    rate, peak = ceilings["read_bytes_per_s"], ceilings.get("flops", math.inf)
    return max(decode_bytes / rate, decode_flops / peak) + max(prompt_bytes / rate, prompt_flops / peak)


NO_LOAD = Load(0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0)
