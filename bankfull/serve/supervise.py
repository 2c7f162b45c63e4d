"""Supervised background tasks: a task that fails is logged and restarted, with an exponential back-off.

A task that should run as long as the service must never end silently. `/ready` and the metrics report the tasks that
fail.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from bankfull.errors import BankfullError

log = logging.getLogger("bankfull.serve")

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 10.0
CALM_SECONDS = 60.0
"""Seconds after which a running task counts as healthy: its back-off starts again with the shortest pause."""

Work = Callable[[], Coroutine[Any, Any, None]]


class Supervisor:
    """Supervises tasks on one event loop. Tests replace `clock` and `sleep`."""

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._kept: dict[asyncio.Task[None], _Kept] = {}
        self._names: set[str] = set()
        self.restarts: Counter[str] = Counter()

    def keep(self, name: str, work: Work, *, ends: bool = False, about: str = "") -> asyncio.Task[None]:
        """Runs `work()` again and again until the returned task is cancelled, or the supervisor is closed. A return is
        a failure, too, unless `ends`. Several tasks may share a name; `about` tells them apart in the log."""
        kept = _Kept(name, f"{name} {about}".strip())
        task = asyncio.get_running_loop().create_task(self._keep(kept, work, ends), name=f"keeper of {name}")
        self._names.add(name)
        self._kept[task] = kept
        task.add_done_callback(self._kept.pop)
        return task

    @property
    def running(self) -> dict[str, list[asyncio.Task[None]]]:
        """The running tasks by name, without those that wait for their restart."""
        tasks: dict[str, list[asyncio.Task[None]]] = {name: [] for name in sorted(self._names)}
        for kept in self._kept.values():
            if kept.current is not None:
                tasks[kept.name].append(kept.current)
        return tasks

    @property
    def up(self) -> dict[str, bool]:
        """Whether all tasks of a name are healthy. A task is not from its failure until it has run for as long as its
        back-off, so that a task that fails at once every time never looks healthy."""
        now = self._clock()
        troubled = {kept.name for kept in self._kept.values() if kept.current is None or now < kept.well_from}
        return {name: name not in troubled for name in sorted(self._names)}

    @property
    def troubled(self) -> list[str]:
        return [name for name, well in self.up.items() if not well]

    async def close(self) -> None:
        """Cancel all tasks, and wait until they have ended."""
        tasks = list(self._kept)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, kept: _Kept, work: Work, ends: bool) -> None:
        pause = FIRST_PAUSE
        while True:
            begun = self._clock()
            kept.current = current = asyncio.get_running_loop().create_task(work(), name=kept.name)
            try:
                await asyncio.wait({current})
            finally:  # only cancelling the keeper is final: cancelled work is restarted
                if not current.done():
                    current.cancel()
                    await asyncio.gather(current, return_exceptions=True)
            error = None if current.cancelled() else _first_cause(current.exception())
            if ends and error is None and not current.cancelled():
                return
            if self._clock() - begun >= CALM_SECONDS:
                pause = FIRST_PAUSE
            kept.current = None
            self.restarts[kept.name] += 1
            how = "was cancelled" if current.cancelled() else "ended by itself" if error is None else f"failed: {error}"
            # Errors of users or of the machine are one sentence; any other is a defect, and its traceback is logged.
            where = error if error is not None and not isinstance(error, BankfullError | OSError) else None
            log.error("the task %s %s; restart in %g s", kept.told, how, pause, exc_info=where)
            await self._sleep(pause)
            kept.well_from = self._clock() + pause
            pause = min(2 * pause, LONGEST_PAUSE)


def _first_cause(error: BaseException | None) -> BaseException | None:
    """The first error of a group, whose own message is only a count."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class _Kept:
    __slots__ = ("current", "name", "told", "well_from")

    def __init__(self, name: str, told: str) -> None:
        self.name, self.told = name, told
        self.current: asyncio.Task[None] | None = None
        self.well_from = 0.0
