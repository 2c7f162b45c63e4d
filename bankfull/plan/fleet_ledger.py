"""The account of a simulated day: every request's times and tokens, and when replicas were paid for and ready."""

from __future__ import annotations

from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]
COLUMNS = ("arrived", "first", "last", "prompt", "cached", "output", "replica")


class FleetLedger:
    def __init__(self, requests: int, seconds: float) -> None:
        """`seconds`: length of the day. Requests may end after it."""
        self.seconds = seconds
        self._columns = np.zeros((len(COLUMNS), requests))
        self.ended = self.refused = self.lost = self.resumed = self.recomputed = 0
        """Requests that ended, were refused by full queues, were lost, continued on another replica; prompt and
        generated tokens that were computed again for that."""
        self.failed = self.updated = 0
        """Replicas that failed, and that an update restarted."""
        self.failures: list[float] = []
        self.updates: list[float] = []
        """Times of failures; begin and end of the update."""
        self._refusals: list[float] = []
        self._paid: list[tuple[float, int]] = [(0.0, 0)]
        self._ready: list[tuple[float, int]] = [(0.0, 0)]
        self.closed = seconds

    def end(
        self, arrived: float, first: float, last: float, prompt: int, cached: int, output: int, replica: int
    ) -> None:
        self._columns[:, self.ended] = (arrived, first, last, prompt, cached, output, replica)
        self.ended += 1

    def refuse(self, now: float) -> None:
        self.refused += 1
        self._refusals.append(now)

    def resume(self, tokens: int) -> None:
        self.resumed += 1
        self.recomputed += tokens

    def paid(self, now: float, change: int) -> None:
        self._paid.append((now, self._paid[-1][1] + change))

    def ready(self, now: float, replicas: int) -> None:
        self._ready.append((now, replicas))

    def close(self, now: float) -> None:
        self.closed = max(now, 1e-9)

    def column(self, name: str) -> Floats:
        """A figure of all requests that ended, in the order of their ends."""
        found: Floats = self._columns[COLUMNS.index(name), : self.ended]
        return found

    def paid_seconds(self, edges: Floats) -> Floats:
        """Seconds that replicas were paid for between two edges, all replicas together."""
        return _areas(self._paid, edges)

    def ready_replicas(self, edges: Floats) -> Floats:
        """Mean number of replicas that took requests between two edges."""
        return _areas(self._ready, edges) / np.diff(edges)

    def refusals(self) -> Floats:
        return np.array(self._refusals)


def _areas(changes: list[tuple[float, int]], edges: Floats) -> Floats:
    """Areas below a step function between the edges."""
    times, values = np.array(changes, np.float64).T
    sums = np.concatenate(([0.0], (values[:-1] * np.diff(times)).cumsum()))
    at = np.searchsorted(times, edges, side="right") - 1
    found: Floats = np.diff(sums[at] + values[at] * (edges - times[at]))
    return found
