"""What a policy may ask the scheduler."""

from __future__ import annotations

from collections.abc import Iterable

from bankfull.sched.aside import Aside
from bankfull.sched.sequence import Sequence
from bankfull.state.manager import StateManager


class SchedulerOutlook:
    def __init__(self, state: StateManager, aside: Aside, waiting: Iterable[Sequence]) -> None:
        self._state, self._aside, self._waiting = state, aside, waiting

    def prefill(self, start: int, end: int) -> float | None:
        return self._aside.prices.prefill(start, end)

    def cached(self, sequence: Sequence) -> int:
        if not sequence.request.reuse:
            return 0
        return self._state.match(sequence.chain, sequence.tokens, len(sequence.tokens) - 1).length

    def waiting(self) -> Iterable[Sequence]:
        return self._waiting
