"""A side of a comparison: whatever can do a work in its turn, and tell how fast it was."""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import median
from typing import Protocol

from bankfull.bench.compare.turns import Rests
from benchmarks.cpu_peers.process import EngineProcess
from benchmarks.cpu_peers.works import FreshPrompts, Turn, Work

AFTERGLOW = 1.0
"""Seconds: spinning for a moment behind the work is not idling."""


class Contender(Rests, Protocol):
    @property
    def name(self) -> str:
        """With its version."""
        ...

    @property
    def settings(self) -> Mapping[str, str]:
        """What was found best for it, by work; empty where nothing was searched."""
        ...

    def get_ready(self, work: Work, fresh: FreshPrompts) -> None:
        """Before the pairs of that work."""
        ...

    def rate(self, work: Work, turn: Turn) -> float:
        """Tokens per second of one turn, in which it warms up first."""
        ...

    def resident_bytes(self, fresh: FreshPrompts) -> float:
        """Behind one stream of decoding."""
        ...

    def idle_percent(self, seconds: float) -> float | None:
        """Of one core, when nobody asks anything; None where nothing stays that could idle."""
        ...


class LoadedEngine:
    """A process that stays loaded, and is stopped while it has no turn."""

    settings: Mapping[str, str] = {}

    def __init__(self, engine: EngineProcess) -> None:
        self.engine = engine

    @property
    def name(self) -> str:
        return self.engine.name

    def wake(self) -> None:
        self.engine.wake()

    def sleep(self) -> None:
        self.engine.sleep()

    def cpu_seconds(self) -> float:
        return self.engine.cpu_seconds()

    def get_ready(self, work: Work, fresh: FreshPrompts) -> None:
        work.warm_up(self.engine, fresh)

    def rate(self, work: Work, turn: Turn) -> float:
        """Others have had the caches since its last turn: a first piece of work fetches them back, and does not count.
        Peers' own tools do the same."""
        self.engine.work(turn.first, 1)
        return median(work.rate(self.engine, prompts) for prompts in turn.measured)

    def resident_bytes(self, fresh: FreshPrompts) -> float:
        self.engine.work(fresh.take(1, 32), 32)
        return self.engine.resident_bytes()

    def idle_percent(self, seconds: float) -> float | None:
        time.sleep(AFTERGLOW)
        before = self.engine.cpu_seconds()
        time.sleep(seconds)
        return 100 * (self.engine.cpu_seconds() - before) / seconds
