"""Tasks that one owner starts on the event loop and ends with itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class OwnTasks:
    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        """`failed`: told of the exception with which a task has ended, at once."""
        self._failed = failed
        self._running: set[asyncio.Task[None]] = set()

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    async def end(self) -> None:
        """Cancel all of them, and wait until they have ended."""
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # `failed` was told

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)
