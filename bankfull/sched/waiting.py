"""Sequences that wait for a row, in their order; the policy's gate limits how many new ones are admitted."""

from __future__ import annotations

from collections import OrderedDict

from bankfull.sched.gates import Gate
from bankfull.sched.sequence import OrderedSequences, Sequence


class WaitingQueue(OrderedSequences):
    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.gate = gate
        self._fresh: OrderedDict[Sequence, None] = OrderedDict()
        """Sequences that never ran, in the order of arrival."""

    def arrive(self, seq: Sequence) -> None:
        """Queue a new sequence; preempted ones come back by `enter`."""
        self._fresh[seq] = None
        self.enter(seq)

    def leave(self, seq: Sequence) -> None:
        super().leave(seq)
        self._fresh.pop(seq, None)

    def quota(self, running: int, now: float, sealed: bool) -> int:
        """New sequences that may be admitted now."""
        return self.gate.open(len(self._fresh), self._first_queued, running, now, sealed) if self._fresh else 0

    def wake_at(self) -> float | None:
        """The time at which `quota` may grow although nothing arrives."""
        return self.gate.wake_at(len(self._fresh), self._first_queued)

    @property
    def _first_queued(self) -> float:
        return next(iter(self._fresh)).queued_at if self._fresh else 0.0

    def admissible(self, index: int, quota: int, tenant: str | None = None) -> int | None:
        """Index of the first sequence from `index` on, of this tenant or of any, that could be admitted."""
        if quota <= 0 and len(self._fresh) == len(self):
            return None
        for i in range(index, len(self)):
            seq = self[i]
            if seq.parent is None and (seq.admitted or quota > 0) and tenant in (None, seq.tenant):
                return i
        return None
