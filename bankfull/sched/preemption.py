"""Preemption: which running sequences are preempted so that waiting ones can be admitted."""

from __future__ import annotations

from collections.abc import Callable

from bankfull.config import SchedConfig
from bankfull.sched.admission import AdmissionRoom
from bankfull.sched.gates import WaitingQueue
from bankfull.sched.pace import Pace
from bankfull.sched.policy import Policy
from bankfull.sched.sequence import Sequence
from bankfull.sched.shares import Holdings, Tenants, first_of_each
from bankfull.sched.step_builder import StepBuilder
from bankfull.state.manager import StateManager
from bankfull.state.sequence_state import Match


class Preemption:
    preempt: Callable[[Sequence], None]
    """Set by the scheduler."""

    def __init__(
        self,
        config: SchedConfig,
        state: StateManager,
        policy: Policy,
        room: AdmissionRoom,
        tenants: Tenants,
        waiting: WaitingQueue,
        running: list[Sequence],
        free_rows: list[int],
        pace: Pace,
    ) -> None:
        """The lists are the scheduler's own."""
        self._config, self._state, self._policy, self._room, self._tenants = config, state, policy, room, tenants
        self._waiting, self._running, self._free_rows, self._pace = waiting, running, free_rows, pace

    def for_waiting(self, step: StepBuilder) -> None:
        """Before running sequences are served, preempt those that give way to a waiting one, if that admits it."""
        if not self._policy.preemptive or (index := self._waiting.admissible(0, step.quota)) is None:
            return
        if not self._tenants.compete:
            head = self._waiting[index]
            return self._preempt_for(head) if self._would_run(head, step) else None
        fresh = step.quota > 0
        able = (seq for seq in self._waiting[index:] if seq.parent is None and (seq.admitted or fresh))
        for head in list(first_of_each(able)):
            self._preempt_for(head)
            if self._entitled(head):
                step.claims.append(head)

    def _would_run(self, head: Sequence, step: StepBuilder) -> bool:
        """Whether the step has tokens for `head` after the running prompts before it in order. If not, a sequence that
        gave way now would lose its turns for nothing."""
        if head.parked is not None and head.parked.computed >= len(head.tokens) - 1:
            return True  # it decodes, and needs nothing that prompts take
        before = [seq.missing for seq in self._running if seq.missing > 1 and seq.order < head.order]
        if not before:
            return True
        decodes = sum(seq.missing == 1 for seq in self._running)
        tokens = min(step.budget - decodes, step.prompt_tokens)
        if (room := self._pace.room(decodes, decodes > 0)) is not None:
            tokens = min(tokens, room.tokens(False))
        return len(before) < step.prompt_rows and sum(before) < tokens

    def _preempt_for(self, head: Sequence) -> None:
        match: Match | None = None
        while giving := self._giving_way_to(head):
            if match is None:  # else it is as before: preemption evicts nothing
                match = self._room.match(head)
            pages, slots = self._room.lack(head, match)
            if self._free_rows and self.coming(pages, slots):
                return  # it fits, or soon will
            gain = sum(self._state.held(s.state) for s in giving if s.state is not None)
            if pages > self._state.pages.coming + gain:
                return
            self.preempt(giving[-1])

    def coming(self, pages: int, slots: int) -> bool:
        """Whether quarantine gives back that much by itself: then waiting is cheaper than preemption."""
        return pages <= self._state.pages.coming and slots <= self._state.slots.coming

    def _giving_way_to(self, head: Sequence) -> list[Sequence]:
        beyond = None
        if self._tenants.compete:
            peers = self._peers(head)
            beyond = self.holdings(peers).beyond(peers) if self._entitled(head) else []
        return self._policy.giving_way(head, self._running, beyond)

    def _entitled(self, head: Sequence) -> bool:
        """Whether what its tenant holds and what `head` needs stay within the tenant's share."""
        need = self._state.frames_for(self._room.reach(head), self._config.step_tokens)
        return self.holdings(self._peers(head)).entitled(head.tenant, need)

    def _peers(self, head: Sequence) -> list[Sequence]:
        """Running sequences of the same kind: batch work or not."""
        return [seq for seq in self._running if seq.batch == head.batch]

    def holdings(self, running: list[Sequence]) -> Holdings:
        return Holdings(running, self._state, self._config.rows, len(self._tenants))
