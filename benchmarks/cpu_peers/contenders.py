"""One side of a comparison: an engine that runs a work and reports its speed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import median
from typing import Protocol

from bankfull.bench.compare.turns import Pausable
from benchmarks.cpu_peers.process import EngineProcess
from benchmarks.cpu_peers.works import FreshPrompts, Turn, Work

AFTERGLOW = 1.0
"""Seconds of spinning after work that do not count as idle CPU use."""


class Contender(Pausable, Protocol):
    @property
    def name(self) -> str:
        """Name with version."""
        ...

    @property
    def settings(self) -> Mapping[str, str]:
        """Best settings by work; empty if none were searched."""
        ...

    def get_ready(self, work: Work, fresh: FreshPrompts) -> None:
        """Called before the pairs of a work."""
        ...

    def rate(self, work: Work, turn: Turn) -> float:
        """Tokens per second of one turn, which begins with a warm-up."""
        ...

    def resident_bytes(self, fresh: FreshPrompts) -> float:
        """Resident memory after one decoded stream."""
        ...

    def idle_percent(self, seconds: float) -> float | None:
        """Percent of one core used without requests; None if no process stays loaded."""
        ...


class LoadedEngine:
    """A process that stays loaded, and is paused between its turns."""

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
        """The other engine has evicted the caches: a first request reloads them and does not count. The peers' own
        tools do the same."""
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
