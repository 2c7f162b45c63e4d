"""Stalls of an event loop: times when it did not run although it had work.

A client that measures with its own clock must tell its stalls from the server's. The loop reports when it goes to sleep
and when it wakes. Waking late, waiting for a core after a wake-up, and time off the CPU between two sleeps are charged
to the machine; CPU time between two sleeps is charged to the client.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic, thread_time

WORTH_NOTING = 2e-4
"""Seconds; shorter stalls do not affect figures in milliseconds."""
AFTERMATH = 1e-3
"""Seconds after a stall in which the backlog is processed."""


@dataclass(frozen=True, slots=True)
class Stall:
    begin: float
    end: float
    own: float
    """CPU seconds that the loop's thread used during the stall."""

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @property
    def by_machine(self) -> bool:
        return self.own < self.seconds / 2


class StallWatch:
    """Records the stalls of the calling thread."""

    def __init__(self) -> None:
        self.stalls: list[Stall] = []
        self._until: float | None = None
        self._slept_at = self._woke_at = monotonic()
        self._used = thread_time()
        self._file: int | None = None
        with suppress(OSError):  # Linux only, and optional there
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        self._waited = self._waiting()

    def goes_to_sleep(self, timeout: float | None) -> None:
        now, used = monotonic(), thread_time()
        self._note(self._woke_at, now, used - self._used)
        self._until = None if timeout is None else now + max(timeout, 0.0)
        self._slept_at = now

    def wakes(self) -> None:
        now = monotonic()
        waited = self._waiting()
        late = 0.0 if self._until is None else now - self._until
        self._note(now - min(max(late, waited - self._waited), now - self._slept_at), now, 0.0)
        self._waited, self._woke_at, self._used = waited, now, thread_time()

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _note(self, begin: float, end: float, own: float) -> None:
        if end - begin > WORTH_NOTING:
            self.stalls.append(Stall(begin, end, own))

    def _waiting(self) -> float:
        """Seconds that the thread has waited for a core while runnable."""
        return 0.0 if self._file is None else int(os.pread(self._file, 64, 0).split()[1]) / 1e9


@dataclass(frozen=True, slots=True)
class Stalled:
    """Total of the stalls with one cause."""

    times: int
    seconds: float
    longest: float


def sums(stalls: Sequence[Stall]) -> tuple[Stalled, Stalled]:
    """Stalls caused by the machine, and by the client's own work."""
    theirs = [stall.seconds for stall in stalls if stall.by_machine]
    own = [stall.seconds for stall in stalls if not stall.by_machine]
    by_machine, by_itself = (Stalled(len(some), sum(some), max(some, default=0.0)) for some in (theirs, own))
    return by_machine, by_itself


def worst_at(stalls: Sequence[Stall], moment: float) -> Stall | None:
    """The longest stall that may have delayed `moment`; stalls are sorted and do not overlap."""
    number = bisect_left(stalls, moment, key=lambda stall: stall.begin)
    worst: Stall | None = None
    while number and stalls[number - 1].end + AFTERMATH >= moment:
        number -= 1
        if worst is None or stalls[number].seconds > worst.seconds:
            worst = stalls[number]
    return worst
