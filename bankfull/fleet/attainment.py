"""Which online requests meet the latency objectives of the server (`--slo`). Batch work has none."""

from __future__ import annotations

import time
from collections.abc import Callable

from bankfull.traffic.slo import Slo


class SloMeter:
    """Counts requests that meet or miss the objectives. A request without a token counts as missed as soon as its
    time to first token has passed, not when it ends: else a queue would hide the requests that wait in it."""

    def __init__(self, slo: Slo, clock: Callable[[], float] = time.monotonic) -> None:
        self.slo = slo
        self.met = self.missed = 0
        """Requests since the start of the server."""
        self._clock = clock
        self._waiting: dict[int, RequestGoals] = {}
        """Requests without a token, the oldest first."""
        self._taken = (0, 0)

    def begin(self, asked: float) -> RequestGoals:
        """A request was submitted at this time."""
        goals = RequestGoals(self, asked)
        if self.slo.ttft is not None:
            self._waiting[id(goals)] = goals
        return goals

    def settle(self) -> None:
        """Count the requests that wait too long already."""
        if self.slo.ttft is None:
            return
        latest = self._clock() - self.slo.ttft
        while (oldest := next(iter(self._waiting.values()), None)) is not None and oldest.asked < latest:
            oldest.miss()

    def take(self) -> tuple[int, int]:
        """Requests that were judged since the last call, and those of them that missed an objective."""
        self.settle()
        met, missed = self._taken
        self._taken = (self.met, self.missed)
        return self.met - met + self.missed - missed, self.missed - missed

    def answered(self, goals: RequestGoals) -> None:
        self._waiting.pop(id(goals), None)


class RequestGoals:
    """One request and its objectives. `tokens` runs for every token of every stream."""

    __slots__ = ("_first", "_gap", "_judged", "_last", "_meter", "asked")

    def __init__(self, meter: SloMeter, asked: float) -> None:
        self._meter, self.asked = meter, asked
        self._first: float | None = None
        self._last = asked
        self._gap = 0.0
        self._judged = False

    def tokens(self, now: float) -> None:
        """Tokens have arrived."""
        if self._first is None:
            self._first = now
            self._meter.answered(self)
        elif now - self._last > self._gap:
            self._gap = now - self._last
        self._last = now

    def tokens_until(self, now: float, gap: float) -> None:
        """Several tokens have arrived after the first one, the last of them now. `gap`: the longest time between two
        tokens so far, for a caller that measures it itself."""
        self._gap = max(self._gap, gap)
        self._last = now

    def end(self, now: float, tokens: int, samples: int) -> None:
        """The request has ended with that many tokens of all samples."""
        later = tokens / max(1, samples) - 1
        first = self._first
        figures = {
            "ttft": None if first is None else first - self.asked,
            "tpot": None if first is None or later <= 0 else (self._last - first) / later,
            "itl": self._gap or None,
            "e2e": now - self.asked,
        }
        self._meter.answered(self)
        if not self._judged:
            self._judged = True
            met = self._meter.slo.met(figures)
            self._meter.met += met
            self._meter.missed += not met

    def miss(self) -> None:
        self._meter.answered(self)
        self._judged = True
        self._meter.missed += 1

    def leave(self) -> None:
        """The request has ended without an answer, or its client has left: it is not judged."""
        self._meter.answered(self)
        self._judged = True
