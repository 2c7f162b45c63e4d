"""The number of replicas, from the depth of their queues and the latency objectives of their requests."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from bankfull.fleet.replica_range import ReplicaRange

LOOK_SECONDS = 1.0
"""Time between two decisions."""
UP_LOOKS = 5
"""A replica is added after this many looks in a row at a queue, or at too many missed objectives."""
DOWN_LOOKS = 300
"""A replica is removed after this many looks in a row at spare capacity."""
SPARE = 0.5
"""A replica is removed if the others would use at most this fraction of their rows."""
MISSED_SHARE = 0.1
"""Objectives count as missed while more than this fraction of the recent requests misses them."""
WINDOW_LOOKS = 30
"""Looks whose requests are recent."""
FEWEST_JUDGED = 5
"""Fewer recent requests than this say nothing about the latency."""


@dataclass(frozen=True, slots=True)
class Demand:
    """The work of all replicas together, without batch work that only fills idle rows."""

    running: int
    waiting: int
    rows: int
    """Sequences that all replicas can run at once."""
    settled: bool
    """Whether every replica is ready: none is loading, none is draining."""
    judged: int = 0
    """Requests that have met or missed their latency objectives since the last look; 0 without objectives."""
    missed: int = 0
    """Requests among `judged` that have missed an objective."""


class Autoscaler:
    """Adds or removes one replica at a time: a new replica's effect is seen before the next decision."""

    def __init__(self) -> None:
        self._queued = self._missing = self._spare = 0
        """Looks in a row at a queue, at missed objectives, and at spare capacity."""
        self._recent: deque[tuple[int, int, int]] = deque(maxlen=WINDOW_LOOKS)
        """Judged requests, missed ones, and sequences that ran or waited, of each look with the present replicas."""
        self.reason = ""
        """Why the last call changed the number, or did not although objectives are missed (at the first such look);
        else empty."""

    def decide(self, bounds: ReplicaRange, replicas: int, demand: Demand) -> int:
        """The number of replicas from now on; called once in LOOK_SECONDS."""
        self.reason = ""
        if not bounds.least <= replicas <= bounds.most:
            return self._change(min(max(replicas, bounds.least), bounds.most), f"{bounds} are wanted")
        if not demand.settled:
            self._forget()
            return replicas
        self._look(replicas, demand)
        if self._queued >= UP_LOOKS and replicas < bounds.most:
            return self._change(replicas + 1, f"requests have waited for {_seconds(UP_LOOKS)}")
        if self._missing >= UP_LOOKS:
            judged, missed = self._judged()
            share = f"{missed} of the last {judged} requests missed a latency objective"
            crowded = self._crowd() > replicas
            if crowded and replicas < bounds.most:
                return self._change(replicas + 1, share)
            if self._missing == UP_LOOKS:
                why = f"{bounds.most} is the most" if crowded else "no replica had more than one request at a time"
                self.reason = f"{share}, but {why}"
        elif self._spare >= DOWN_LOOKS and replicas > bounds.least:
            return self._change(
                replicas - 1, f"the others have needed at most {SPARE:.0%} of their rows for {_seconds(DOWN_LOOKS)}"
            )
        return replicas

    def _change(self, replicas: int, why: str) -> int:
        self._forget()
        self.reason = why
        return replicas

    def _look(self, replicas: int, demand: Demand) -> None:
        self._recent.append((demand.judged, demand.missed, demand.running + demand.waiting))
        judged, missed = self._judged()
        missing = judged >= FEWEST_JUDGED and missed > MISSED_SHARE * judged
        left = demand.rows * (replicas - 1) / max(1, replicas)
        spare = not demand.waiting and not missing and demand.running <= SPARE * left
        self._queued = self._queued + 1 if demand.waiting else 0
        self._missing = self._missing + 1 if missing else 0
        self._spare = self._spare + 1 if spare else 0

    def _judged(self) -> tuple[int, int]:
        return sum(look[0] for look in self._recent), sum(look[1] for look in self._recent)

    def _crowd(self) -> int:
        """The most sequences that ran or waited at one look. Where no replica has two, another one changes nothing."""
        return max((look[2] for look in self._recent), default=0)

    def _forget(self) -> None:
        """The replicas change: earlier looks say nothing about those that are there next."""
        self._queued = self._missing = self._spare = 0
        self._recent.clear()


def _seconds(looks: int) -> str:
    return f"{looks * LOOK_SECONDS:g} seconds"
