"""The watchdog: distinguishes an engine that hangs from an idle one.

Time without progress is counted in beats, not read from a clock: after a pause in which this process itself did not
run, the engine's messages are read before the next beat.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

BEATS = 20
"""Beats in the time after which an engine counts as stalled."""


async def stalled(seconds: float, busy: Callable[[], bool], progress: Callable[[], int]) -> None:
    """Returns when `busy` was true and `progress` did not change for `seconds`."""
    quiet, before = 0, progress()
    while quiet < BEATS:
        await asyncio.sleep(seconds / BEATS)
        now = progress()
        quiet = quiet + 1 if busy() and now == before else 0
        before = now
