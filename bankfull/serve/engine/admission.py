"""Admission: a queue bounded by requests and by tokens, with a realistic Retry-After for refused requests.

The queue is bounded because a request at the end of a long one would wait longer than its client does. Batch work is
not counted: it has no deadline, and the batch runner bounds it. Where several tenants share the engine, none can fill
the queue: each may hold three times as much as is still free, so that there is always room for another.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from bankfull.errors import ConfigError
from bankfull.sched.policy import BATCH_PRIORITY
from bankfull.serve.engine.backend import Busy, Unavailable
from bankfull.serve.engine.wire import Facts

__all__ = ["BATCH_PRIORITY", "Admission", "QueueLimits", "Ticket"]

REMEMBERED = 256
"""Ended requests from which the rate of ends is estimated."""
WINDOW = 30.0
"""Seconds after which an end is too old for the estimate."""
GREED = 3
"""Multiple of the free room that one tenant may hold: three quarters of the queue when it is alone."""
SHORTEST_WAIT, LONGEST_WAIT = 1.0, 60.0


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Requests and tokens that may wait beyond those that run at once. None: as many again."""

    requests: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("requests", self.requests), ("tokens", self.tokens)):
            if value is not None and value < 0:
                raise ConfigError(f"The queue's limit of {name} is {value}; give 0 or more.")


@dataclass(slots=True, eq=False)
class Ticket:
    samples: int
    tokens: int
    """Tokens of the prompt, and the most that may be generated."""
    counted: bool
    tenant: str = ""


class Admission:
    def __init__(self, limits: QueueLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._most_samples = self._most_tokens = 0
        self._max_len = 0
        self.samples = self.tokens = 0
        """Samples and tokens of admitted online requests that have not ended."""
        self._samples_of: Counter[str] = Counter()
        self._tokens_of: Counter[str] = Counter()
        """The same by tenant; the tenant "" may fill the whole queue."""
        self._ends: deque[tuple[float, int, int]] = deque(maxlen=REMEMBERED)
        self._promised = 0.0
        self._closed: str | None = "The model is still being loaded."

    @property
    def says(self) -> str:
        """Why requests are refused; empty while they are admitted."""
        return self._closed or ""

    def open(self, facts: Facts) -> None:
        """Admit requests to an engine of this size."""
        rows, pool = facts.rows, facts.pages * facts.page_tokens or facts.rows * facts.max_len
        self._most_samples = rows + (rows if self._limits.requests is None else self._limits.requests)
        self._most_tokens = pool + (pool if self._limits.tokens is None else self._limits.tokens)
        self._max_len = facts.max_len
        self._closed = None

    def close(self, reason: str) -> None:
        """Refuse new requests; admitted ones go on."""
        self._closed = reason

    def enter(
        self,
        prompt: int,
        samples: int,
        max_tokens: int | None,
        priority: int,
        tenant: str = "",
        *,
        admitted: bool = False,
    ) -> Ticket:
        """Raises Busy or Unavailable. A request that another engine has `admitted` is counted, but not refused for a
        full queue."""
        most = max(0, self._max_len - prompt)
        tokens = prompt + samples * (most if max_tokens is None else min(max_tokens, most))
        if not admitted:
            self.expect(samples, tokens, priority, tenant)
        elif self._closed is not None:
            raise Unavailable(self._closed)
        if priority >= BATCH_PRIORITY:
            return Ticket(samples, tokens, counted=False)
        self._count(tenant, samples, tokens)
        return Ticket(samples, tokens, counted=True, tenant=tenant)

    def expect(self, samples: int, tokens: int, priority: int, tenant: str = "") -> None:
        """Raises what `enter` would for a request of at least this size, without admitting it."""
        if self._closed is not None:
            raise Unavailable(self._closed)
        # An empty queue admits any request: the engine itself refuses those that it can never run.
        full = self.samples + samples > self._most_samples or self.tokens + tokens > self._most_tokens
        if priority < BATCH_PRIORITY and self.samples and full:
            wait = self._wait_for(samples, tokens)
            raise Busy(f"{self.samples} answers are running or queued already; try again in {wait:.0f} seconds.", wait)
        if priority < BATCH_PRIORITY and self._greedy(tenant, samples, tokens):
            wait = self._wait_for(samples, tokens)
            raise Busy(
                f"{self._samples_of[tenant]} answers of this key are running or queued already, and the remaining "
                f"room is for other keys; try again in {wait:.0f} seconds.",
                wait,
            )

    def _greedy(self, tenant: str, samples: int, tokens: int) -> bool:
        """Whether the tenant, which has requests in the queue already, would leave too little room for others."""
        if not tenant or not self._samples_of[tenant]:
            return False
        free_samples = self._most_samples - self.samples - samples
        free_tokens = self._most_tokens - self.tokens - tokens
        return (
            self._samples_of[tenant] + samples > GREED * free_samples
            or self._tokens_of[tenant] + tokens > GREED * free_tokens
        )

    def _count(self, tenant: str, samples: int, tokens: int) -> None:
        self.samples += samples
        self.tokens += tokens
        self._samples_of[tenant] += samples
        self._tokens_of[tenant] += tokens
        if not self._samples_of[tenant]:
            del self._samples_of[tenant], self._tokens_of[tenant]

    def leave(self, ticket: Ticket) -> None:
        """Once for each ticket, however its request ended."""
        if ticket.counted:
            ticket.counted = False
            self._count(ticket.tenant, -ticket.samples, -ticket.tokens)
            self._ends.append((self._clock(), ticket.samples, ticket.tokens))

    def _wait_for(self, samples: int, tokens: int) -> float:
        """Estimated seconds until there is room for this request, after all others that were refused before it."""
        now = self._clock()
        while self._ends and self._ends[0][0] < now - WINDOW:
            self._ends.popleft()
        if len(self._ends) < 2:
            return SHORTEST_WAIT
        seconds = max(now - self._ends[0][0], 1e-3)
        ended_samples = sum(end[1] for end in self._ends)
        ended_tokens = sum(end[2] for end in self._ends)
        delay = seconds * max(samples / ended_samples, tokens / max(1, ended_tokens))
        self._promised = min(max(self._promised, now) + delay, now + LONGEST_WAIT)
        return min(max(SHORTEST_WAIT, self._promised - now), LONGEST_WAIT)
