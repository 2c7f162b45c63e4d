"""Sequences when the model gets other weights between two steps."""

from __future__ import annotations

from typing import Protocol

from bankfull.sched.gates import WaitingQueue
from bankfull.sched.parking import Parking
from bankfull.sched.sequence import OrderedSequences, Sequence
from bankfull.state.manager import StateManager


class Preempt(Protocol):
    def __call__(self, seq: Sequence, *, kept: bool) -> None:
        """Take a running sequence's row and state; `kept`: it may come back to what it has computed."""
        ...


class Generations:
    def __init__(
        self,
        state: StateManager,
        parking: Parking,
        waiting: WaitingQueue,
        running: OrderedSequences,
        preempt: Preempt,
    ) -> None:
        """The lists are the scheduler's own."""
        self._state, self._parking, self._waiting, self._running = state, parking, waiting, running
        self._preempt = preempt

    def begin(self, weights: str, restarts: bool) -> None:
        """The model has other weights from now on, and no step is in flight; `weights`: their identity. Running
        sequences go on with the state that they have, which nobody else gets, or start anew (`restarts`) like those
        that wait. All keep their tokens."""
        self._state.begin_generation(weights)
        for seq in reversed(self._running[:]) if restarts else ():
            self._preempt(seq, kept=False)
        for seq in self._running:
            assert seq.state is not None
            seq.state.mixed = True
        for seq in self._waiting:
            self._parking.forget(seq)
            seq.begin_anew(self._state)
