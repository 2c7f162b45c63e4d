"""What a policy, and whoever follows the schedule, may ask about the queues of a scheduler."""

from __future__ import annotations

from bankfull.sched.gates import WaitingQueue
from bankfull.sched.parking import Parking
from bankfull.sched.sequence import Sequence
from bankfull.sched.shares import Tenants
from bankfull.state.manager import StateManager


class QueueFacts:
    def __init__(
        self,
        state: StateManager,
        parking: Parking,
        tenants: Tenants,
        waiting: WaitingQueue,
        running: list[Sequence],
        free_rows: list[int],
    ) -> None:
        """The lists are the scheduler's own."""
        self._state, self._parking, self._tenants = state, parking, tenants
        self.waiting, self.running, self._free_rows = waiting, running, free_rows
        """The sequences that wait for a row, and those that have one, in their order."""

    def prefill(self, start: int, end: int) -> float | None:
        """Predicted seconds to compute the tokens from `start` to `end` of one sequence; None if nothing is known."""
        return self._parking.prices.prefill(start, end)

    def cached(self, sequence: Sequence) -> int:
        """Leading tokens of a waiting sequence whose state is on the device."""
        if not sequence.request.reuse:
            return 0
        return self._state.match(sequence.chain, sequence.tokens, len(sequence.tokens) - 1).length

    @property
    def free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def contested(self) -> bool:
        """Whether tenants compete, each of them for its share."""
        return self._tenants.compete

    def admissible(self, now: float, sealed: bool) -> Sequence | None:
        """The first waiting sequence that the gate lets in; None if there is none."""
        index = self.waiting.admissible(0, self.waiting.quota(len(self.running), now, sealed))
        return None if index is None else self.waiting[index]
