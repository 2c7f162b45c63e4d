"""An event loop that wakes to the tenth of a millisecond, does nothing else meanwhile, and notes when it could not."""

from __future__ import annotations

import asyncio
import gc
import select
import selectors
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from bankfull.bench.load.stalls import Stall, StallWatch
from bankfull.bench.load.stamped import KernelClock

Made = TypeVar("Made")
SWITCH = 1e-4
"""Seconds that another thread, one that draws a progress bar, may keep the interpreter from the loop."""


class PreciseSelector(selectors.EpollSelector):
    """epoll waits in whole milliseconds, which would make every request up to one late. `select` waits in microseconds,
    and an epoll descriptor is itself something that it can wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.watch = StallWatch()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.watch.goes_to_sleep(timeout)
        if timeout is None or timeout > 0:
            select.select([self.fileno()], [], [], timeout)
        self.watch.wakes()
        return super().select(0)


class PreciseLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._precise = PreciseSelector()
        self.stamps = KernelClock()
        """What the kernel stamped, in the loop's time."""
        super().__init__(self._precise)

    @property
    def stalls(self) -> list[Stall]:
        """In the loop's time."""
        return self._precise.watch.stalls

    def close(self) -> None:
        super().close()
        self._precise.watch.close()


def run_precisely(make: Callable[[], Coroutine[Any, Any, Made]]) -> Made:
    with asyncio.Runner(loop_factory=PreciseLoop) as runner, without_collections(), switching_soon():
        return runner.run(make())


@contextmanager
def without_collections() -> Iterator[None]:
    """A garbage collection stops the loop for milliseconds; a run makes few cycles, and ends."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


@contextmanager
def switching_soon() -> Iterator[None]:
    usual = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)
