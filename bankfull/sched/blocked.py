"""Head-of-line blocking: how long each sequence waited behind others.

A sequence is blocked while it waits for a row, an idle engine would run it at once, and others have rows. This counts
the time before its first row and the time after every preemption. It does not count the time in which an engine
without any running sequence waits to complete a batch, the time in which its own prefix is on its way from a lower
tier while it would otherwise be admitted, and the time in which a sample waits for the prompt that it shares with its
sibling. A request is blocked as long as the one of its samples that is blocked longest. The rest of its time is its
own: it runs, alone or beside others.
"""

from __future__ import annotations

from collections.abc import Callable

from bankfull.sched.sequence import Sequence


class Blocking:
    """One clock that runs while any sequence has a row; a wait is the difference of two of its readings."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._total = 0.0
        self._since: float | None = None
        """Time since which the engine is occupied; None while it is idle."""

    def occupied(self) -> None:
        """The first sequence has got a row."""
        self._since = self._clock()

    def idle(self) -> None:
        """The last sequence has left its row."""
        if self._since is not None:
            self._total += self._clock() - self._since
            self._since = None

    @property
    def _now(self) -> float:
        return self._total if self._since is None else self._total + self._clock() - self._since

    def begin(self, seq: Sequence) -> None:
        """From now on only others keep the sequence from running, if it was not so before."""
        if seq.blocked_since is None:
            seq.blocked_since = self._now

    def end(self, seq: Sequence) -> None:
        """The sequence runs, has ended, or waits for something of its own."""
        if seq.blocked_since is not None:
            seq.blocked += self._now - seq.blocked_since
            seq.blocked_since = None
