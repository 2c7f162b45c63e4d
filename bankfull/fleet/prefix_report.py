"""The engine's reports about its prefix cache, for a front that routes between replicas."""

from __future__ import annotations

import time
from collections.abc import Callable

from bankfull.fleet.reports import PrefixChanges
from bankfull.state.manager import StateManager

REPORT_SECONDS = 0.05
"""Least time between two reports of a busy engine; routing needs no finer view, and each costs the front a wake-up."""


class PrefixReporter:
    def __init__(self, state: StateManager, clock: Callable[[], float] = time.monotonic) -> None:
        self._journal = state.journal()
        self._clock = clock
        self._reported = clock() - REPORT_SECONDS

    def report(self, idle: bool) -> PrefixChanges | None:
        """The changes to send with this step, if any. An engine that becomes idle reports at once: no later step would
        carry the last changes."""
        if not self._journal.changed:
            return None
        now = self._clock()
        if not idle and now < self._reported + REPORT_SECONDS:
            return None
        self._reported = now
        return PrefixChanges(*self._journal.take())
