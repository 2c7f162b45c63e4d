"""What a policy may ask beside the sequences."""

from __future__ import annotations

from collections.abc import Iterable

from bankfull.sched.parking import Parking
from bankfull.sched.sequence import Sequence
from bankfull.state.manager import StateManager


class QueueFacts:
    def __init__(self, state: StateManager, parking: Parking, waiting: Iterable[Sequence]) -> None:
        self._state, self._parking, self._waiting = state, parking, waiting

    def prefill(self, start: int, end: int) -> float | None:
        """Predicted seconds to compute the tokens from `start` to `end` of one sequence; None if nothing is known."""
        return self._parking.prices.prefill(start, end)

    def cached(self, sequence: Sequence) -> int:
        """Leading tokens of a waiting sequence whose state is on the device."""
        if not sequence.request.reuse:
            return 0
        return self._state.match(sequence.chain, sequence.tokens, len(sequence.tokens) - 1).length

    def waiting(self) -> Iterable[Sequence]:
        """The sequences that wait for a row, in their order."""
        return self._waiting
