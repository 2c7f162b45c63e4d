"""How many replicas there should be, from the depth of their queues."""

from __future__ import annotations

from dataclasses import dataclass

from bankfull.fleet.replica_range import ReplicaRange

LOOK_SECONDS = 1.0
"""Time between two decisions."""
UP_LOOKS = 5
"""Looks in a row at a queue after which a replica is added."""
DOWN_LOOKS = 300
"""Looks in a row at spare capacity after which a replica is removed."""
SPARE = 0.5
"""A replica is removed if the others would use at most this fraction of their rows."""


@dataclass(frozen=True, slots=True)
class Demand:
    """The work of all replicas together, without batch work that only fills idle rows."""

    running: int
    waiting: int
    rows: int
    """Sequences that all replicas can run at once."""
    settled: bool
    """Whether every replica is ready: none is loading, none is draining."""


class Autoscaler:
    """Adds or removes one replica at a time: a new replica's effect on the queue is seen before the next decision."""

    def __init__(self) -> None:
        self._queued = self._spare = 0

    def decide(self, bounds: ReplicaRange, replicas: int, demand: Demand) -> int:
        """The number of replicas from now on; called once in LOOK_SECONDS."""
        if not bounds.least <= replicas <= bounds.most:
            return min(max(replicas, bounds.least), bounds.most)
        if not demand.settled:
            self._queued = self._spare = 0
            return replicas
        left = demand.rows * (replicas - 1) / max(1, replicas)
        self._queued = self._queued + 1 if demand.waiting else 0
        self._spare = self._spare + 1 if not demand.waiting and demand.running <= SPARE * left else 0
        if self._queued >= UP_LOOKS and replicas < bounds.most:
            self._queued = 0
            return replicas + 1
        if self._spare >= DOWN_LOOKS and replicas > bounds.least:
            self._spare = 0
            return replicas - 1
        return replicas
