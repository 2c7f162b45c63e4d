"""An event loop that wakes to the tenth of a millisecond, and does nothing else meanwhile."""

from __future__ import annotations

import asyncio
import gc
import select
import selectors
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

Made = TypeVar("Made")


class PreciseSelector(selectors.EpollSelector):
    """epoll waits in whole milliseconds, which would make every request up to one late. `select` waits in microseconds,
    and an epoll descriptor is itself something that it can wait for."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout > 0:
            select.select([self.fileno()], [], [], timeout)
        return super().select(0)


def new_loop() -> asyncio.AbstractEventLoop:
    return asyncio.SelectorEventLoop(PreciseSelector())


def run_precisely(make: Callable[[], Coroutine[Any, Any, Made]]) -> Made:
    with asyncio.Runner(loop_factory=new_loop) as runner, without_collections():
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
