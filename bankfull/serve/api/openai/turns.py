"""The prompts of one call, so many at a time.

The call's first prompt is refused like any other request when the house is full. Once one of them is in, the others
wait for room: a call that fits into an empty house, one prompt after the other, must not fail for its own length.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from bankfull.serve.engine.backend import Busy
from bankfull.serve.engine.wire import Done, Piece

Steps = AsyncIterator[list[Piece | Done]]


class Turns:
    def __init__(self, at_once: int, ends: float | None = None) -> None:
        """`ends`: the call's deadline, by the monotonic clock."""
        self._gate = asyncio.Semaphore(at_once)
        self._door = asyncio.Lock()
        self._ends = ends
        self._begun = False
        self._one_left = asyncio.Event()

    @asynccontextmanager
    async def turn(self, begin: Callable[[], Steps]) -> AsyncIterator[Steps]:
        """The steps of one prompt, which `begin` passes on to the engine; leaving aborts what still runs."""
        async with self._gate:
            # One asks at a time: who was refused is the first to ask again.
            async with self._door:
                steps = await self._let_in(begin)
            try:
                yield steps
            finally:
                await leave(steps)
                self._one_left.set()

    async def _let_in(self, begin: Callable[[], Steps]) -> Steps:
        while True:
            self._one_left.clear()
            try:
                steps = begin()
            except Busy as busy:
                if not self._begun:
                    raise
                await self._wait_for_room(busy.retry_after)
            else:
                self._begun = True
                return steps

    async def _wait_for_room(self, seconds: float) -> None:
        """Until a prompt of this call has left, or as long as any client is told to wait."""
        if self._ends is not None:
            seconds = min(seconds, max(0.0, self._ends - time.monotonic()))
        with suppress(TimeoutError):
            await asyncio.wait_for(self._one_left.wait(), seconds)


async def leave(steps: Steps) -> None:
    """Abort what still runs."""
    close = getattr(steps, "aclose", None)
    if close is not None:
        await close()
