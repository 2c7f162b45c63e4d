"""Alternating measurement of two engines: pairs of the same work in alternating order, the idle engine paused."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from bankfull.bench.compare import process_usage

Work = TypeVar("Work")
Made = TypeVar("Made")


class Pausable(Protocol):
    """An engine that can be paused."""

    def wake(self) -> None: ...

    def sleep(self) -> None: ...

    def cpu_seconds(self) -> float: ...


@dataclass(slots=True)
class Noise:
    """CPU time used by other programs during the turns."""

    seconds: float = 0.0
    elsewhere: float = 0.0

    @property
    def cores(self) -> float | None:
        return self.elsewhere / self.seconds if self.seconds else None


@contextmanager
def turn(engine: Pausable, noise: Noise) -> Iterator[None]:
    engine.wake()
    begun, busy, engine_cpu = time.perf_counter(), process_usage.busy_seconds(), engine.cpu_seconds()
    try:
        yield
    finally:
        seconds = time.perf_counter() - begun
        elsewhere = process_usage.busy_seconds() - busy - (engine.cpu_seconds() - engine_cpu)
        engine.sleep()
        noise.seconds += seconds
        noise.elsewhere += max(0.0, elsewhere)


def in_pairs(
    pairs: int, prepare: Callable[[], Work], ours: Callable[[Work], Made], theirs: Callable[[Work], Made]
) -> Iterator[tuple[Made, Made]]:
    """Results of both for the same work, pair by pair."""
    for number in range(pairs):
        work = prepare()
        if number % 2 == 0:
            first = ours(work)
            yield first, theirs(work)
        else:
            second = theirs(work)
            yield ours(work), second
