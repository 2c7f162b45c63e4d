"""An event loop with 0.1 ms timer precision that pauses garbage collection and records its own stalls."""

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
"""Seconds that another thread, such as a progress bar, may hold the interpreter lock."""


class PreciseSelector(selectors.EpollSelector):
    """epoll waits in whole milliseconds, which would delay every request by up to one. `select` waits in microseconds,
    and can wait for an epoll descriptor."""

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
        """Converts kernel timestamps to the loop's time."""
        super().__init__(self._precise)

    @property
    def stalls(self) -> list[Stall]:
        """Stalls in the loop's time."""
        return self._precise.watch.stalls

    def close(self) -> None:
        super().close()
        self._precise.watch.close()


def run_precisely(make: Callable[[], Coroutine[Any, Any, Made]]) -> Made:
    with asyncio.Runner(loop_factory=PreciseLoop) as runner, without_collections(), switching_soon():
        return runner.run(make())


@contextmanager
def without_collections() -> Iterator[None]:
    """Disable garbage collection, which stops the loop for milliseconds; a run creates few cycles and is short."""
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
