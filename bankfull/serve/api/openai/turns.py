"""The prompts of one call, a limited number at a time.

The first prompt of a call is refused like any other request when the queue is full. Once one prompt is admitted, the
others wait for room: a call whose prompts fit one after the other must not fail because it has many.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from bankfull.outputs import Delta
from bankfull.serve.engine.backend import Busy
from bankfull.serve.engine.wire import RequestDone

Steps = AsyncIterator[list[Delta | RequestDone]]


class PromptGate:
    def __init__(self, at_once: int, ends: float | None = None) -> None:
        """`ends`: the call's deadline, on the monotonic clock."""
        self._gate = asyncio.Semaphore(at_once)
        self._door = asyncio.Lock()
        self._ends = ends
        self._begun = False
        self._one_left = asyncio.Event()

    @asynccontextmanager
    async def turn(self, begin: Callable[[], Steps]) -> AsyncIterator[Steps]:
        """The steps of one prompt, which `begin` submits to the engine; leaving aborts the request."""
        async with self._gate:
            # One prompt at a time: a refused one is the first to try again.
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
        """Until a prompt of this call has ended, or for the time of Retry-After."""
        if self._ends is not None:
            seconds = min(seconds, max(0.0, self._ends - time.monotonic()))
        with suppress(TimeoutError):
            await asyncio.wait_for(self._one_left.wait(), seconds)


async def leave(steps: Steps) -> None:
    """Abort the request if it still runs."""
    close = getattr(steps, "aclose", None)
    if close is not None:
        await close()
