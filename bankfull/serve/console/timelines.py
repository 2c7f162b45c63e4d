"""What became of each request's time: who is being served, and the last who were, beside the limit of the same steps.

Two snapshots of the engine's counters tell which steps ran between them, and the least time that those steps can take
on this machine's ceilings. So a request costs a few references while it runs, and nothing per token: its tokens are
summed up here instead of in its trace, which has them when it ends.
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
from bankfull.serve.engine.wire import Done, Load
from bankfull.serve.telemetry.trace import Trace

REMEMBERED = 200
"""Online requests that have ended; of a batch's lines only a few, or they would push out all others."""
REMEMBERED_LINES = 50
SHOWN_ID = 64


class Line(msgspec.Struct, kw_only=True):
    """One request, as the console shows it. Times are seconds; what is not known is null."""

    number: int
    """In the order of ends, from 1; 0 while it runs."""
    id: str
    key: str | None
    route: str
    batch: bool
    outcome: str
    """waiting, running; then stop, length, ..., or why it has no end of its own."""
    arrived: float
    """On the wall clock."""
    seconds: float
    prepare: float
    """Until the engine was asked: the body, the template, tokens."""
    wait: float | None
    """In the engine until the first token, where it is not known yet how long of that it queued."""
    queue: float | None
    prompt: float | None
    """From the queue to the first token."""
    decode: float | None
    """From the first token to the last."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    first_token: float | None
    """From the request to the first token."""
    first_token_limit: float | None
    """The least time of the steps in between."""
    tokens_per_s: float | None
    """From the first token on, all samples together."""
    tokens_per_s_limit: float | None
    """Had the same steps run at the machine's limit."""


class OpenLine:
    """A request that runs. Whoever counts its steps keeps it; when that is gone, so is this."""

    __slots__ = (
        "__weakref__",
        "_arrived",
        "_asked",
        "_begun",
        "_book",
        "_first",
        "_first_load",
        "_first_tokens",
        "batch",
        "finish",
        "prompt_tokens",
        "tokens",
        "trace",
    )

    def __init__(self, book: TimeLines, trace: Trace, prompt_tokens: int, batch: bool) -> None:
        self._book, self.trace, self.prompt_tokens, self.batch = book, trace, prompt_tokens, batch
        self._asked = book.clock()
        self._arrived = time.time() - (self._asked - trace.arrived)
        self._begun = book.backend.load
        self._first: float | None = None
        self._first_load: Load | None = None
        self._first_tokens = 0
        self.tokens = 0
        self.finish: str | None = None
        """Why its last sample ended."""

    @property
    def key(self) -> str | None:
        return None if self.trace.key is None else self.trace.key.name

    def begin(self, tokens: int, now: float) -> None:
        """What the first step that gave tokens gave; whoever counts adds those of each step to `tokens`."""
        self._first, self._first_load, self._first_tokens = now, self._book.backend.load, tokens

    def end(self, done: Done) -> None:
        """All samples have ended, and all tokens were counted."""
        self._close(self.finish or "stop", done)

    def fail(self, reason: str) -> None:
        self._close(reason, None)

    def _close(self, outcome: str, done: Done | None) -> None:
        self.trace.completion_tokens += self.tokens
        self._book.close(self, self._line(outcome, done))

    def show(self) -> Line:
        return self._line("waiting" if self._first is None else "running", None)

    def _line(self, outcome: str, done: Done | None) -> Line:
        now, load, trace = self._book.clock(), self._book.backend.load, self.trace
        first = now if self._first is None else self._first
        wait: float | None = first - self._asked
        queue = prompt = decode = rate = rate_limit = first_limit = None
        if done is not None:
            queue = min(done.queue or 0.0, first - self._asked)
            wait, prompt = None, first - self._asked - queue
        if self._first is not None:
            decode, later = now - first, self.tokens - self._first_tokens
            first_limit, least = self._least(self._begun, self._first_load), self._least(self._first_load, load)
            rate = later / decode if later and decode > 0 else None
            rate_limit = later / least if later and least else None
        return Line(
            number=0,
            id=trace.id[:SHOWN_ID],
            key=self.key,
            route=trace.path[:200],
            batch=self.batch,
            outcome=outcome,
            arrived=self._arrived,
            seconds=now - trace.arrived,
            prepare=max(0.0, self._asked - trace.arrived),
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
        facts = self._book.backend.facts
        ceilings = None if facts is None else facts.ceilings
        return None if ceilings is None else least_seconds(before or NOTHING, after, ceilings)


class TimeLines:
    """Those of one server."""

    def __init__(self, backend: Backend, clock: Callable[[], float] = time.monotonic) -> None:
        self.backend, self.clock = backend, clock
        self._running: WeakSet[OpenLine] = WeakSet()
        self._ended: deque[Line] = deque(maxlen=REMEMBERED)
        self._ended_lines: deque[Line] = deque(maxlen=REMEMBERED_LINES)
        self._numbers = count(1)

    def open(self, trace: Trace, prompt_tokens: int, *, batch: bool = False) -> OpenLine:
        line = OpenLine(self, trace, prompt_tokens, batch)
        self._running.add(line)
        return line

    def close(self, opened: OpenLine, line: Line) -> None:
        """A request has ended, and this is what is kept of it."""
        self._running.discard(opened)
        line.number = next(self._numbers)
        (self._ended_lines if line.batch else self._ended).append(line)

    def running(self) -> list[OpenLine]:
        """Online requests first, the oldest of each kind first."""
        return sorted(self._running, key=lambda line: (line.batch, line.trace.arrived))

    def ended_after(self, number: int) -> Iterator[Line]:
        for lines in (self._ended, self._ended_lines):
            yield from (line for line in lines if line.number > number)


def least_seconds(before: Load, after: Load | None, ceilings: dict[str, float]) -> float | None:
    """The shortest time in which this machine can run the steps between two snapshots: steps that decode and steps that
    read prompts, each kind bound by its bytes or by its arithmetic. None where the engine was started again."""
    if after is None or after.steps < before.steps:
        return None
    decode_bytes = after.decode_bytes - before.decode_bytes
    decode_flops = after.decode_flops - before.decode_flops
    prompt_bytes = after.bytes_moved - before.bytes_moved - decode_bytes
    prompt_flops = after.flops - before.flops - decode_flops
    rate, peak = ceilings["read_bytes_per_s"], ceilings.get("flops", math.inf)
    return max(decode_bytes / rate, decode_flops / peak) + max(prompt_bytes / rate, prompt_flops / peak)


NOTHING = Load(0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0)
