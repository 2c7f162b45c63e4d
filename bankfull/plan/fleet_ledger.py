"""The account of a simulated day: every request's times and tokens, and when replicas were paid for and ready."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from bankfull.plan.fleet_requests import FleetRequest

Floats = np.ndarray[Any, np.dtype[np.float64]]
COLUMNS = {
    "arrived": np.float64,
    "first": np.float64,
    "last": np.float64,
    "gap": np.float64,
    "prompt": np.int32,
    "cached": np.int32,
    "output": np.int32,
    "replica": np.int32,
}
"""Figures of each request, with their types: times of arrival, of the first and of the last token, the longest time
between two tokens, all in seconds; tokens of the prompt, those of them that were cached, tokens of the answer, and the
replica that ended it."""


class FleetLedger:
    def __init__(self, requests: int, seconds: float) -> None:
        """`seconds`: length of the day. Requests may end after it."""
        self.seconds = seconds
        self._columns = np.zeros(requests, list(COLUMNS.items()))
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

    def end(self, request: FleetRequest, last: float) -> None:
        one = request
        self._columns[self.ended] = (
            one.arrived,
            one.first,
            last,
            one.gap,
            one.prompt,
            one.cached,
            one.output,
            one.replica,
        )
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
        return np.asarray(self._columns[name][: self.ended])

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
    areas: Floats = np.diff(sums[at] + values[at] * (edges - times[at]))
    return areas
