"""Two engines in turn: pairs of the same work, each engine first in every other pair, the other one stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from bankfull.bench.load import machine

Work = TypeVar("Work")
Made = TypeVar("Made")


class Rests(Protocol):
    """An engine that computes only when it has its turn."""

    def wake(self) -> None: ...

    def sleep(self) -> None: ...

    def cpu_seconds(self) -> float: ...


@dataclass(slots=True)
class Noise:
    """CPU time that went elsewhere while engines had their turns."""

    seconds: float = 0.0
    elsewhere: float = 0.0

    @property
    def cores(self) -> float | None:
        return self.elsewhere / self.seconds if self.seconds else None


@contextmanager
def turn(engine: Rests, noise: Noise) -> Iterator[None]:
    engine.wake()
    begun, busy, own = time.perf_counter(), machine.busy_seconds(), engine.cpu_seconds()
    try:
        yield
    finally:
        seconds = time.perf_counter() - begun
        elsewhere = machine.busy_seconds() - busy - (engine.cpu_seconds() - own)
        engine.sleep()
        noise.seconds += seconds
        noise.elsewhere += max(0.0, elsewhere)


def in_pairs(
    pairs: int, prepare: Callable[[], Work], ours: Callable[[Work], Made], theirs: Callable[[Work], Made]
) -> Iterator[tuple[Made, Made]]:
    """What both made of the same work, pair by pair."""
    for number in range(pairs):
        work = prepare()
        if number % 2 == 0:
            first = ours(work)
            yield first, theirs(work)
        else:
            second = theirs(work)
            yield ours(work), second
