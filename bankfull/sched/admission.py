"""Whether a waiting sequence has room, and the state that it starts from."""

from __future__ import annotations

from bankfull.config import SchedConfig
from bankfull.sched.canvas import Canvas
from bankfull.sched.gates import WaitingQueue
from bankfull.sched.parking import Parking
from bankfull.sched.policy import Policy
from bankfull.sched.sequence import Sequence
from bankfull.state.manager import StateManager
from bankfull.state.sequence_state import Match


class AdmissionRoom:
    def __init__(
        self,
        config: SchedConfig,
        state: StateManager,
        policy: Policy,
        parking: Parking,
        running: list[Sequence],
        canvas: Canvas | None,
    ) -> None:
        self._config, self._state, self._policy, self._parking = config, state, policy, parking
        self._running, self._canvas = running, canvas

    def match(self, seq: Sequence) -> Match:
        """What it had when it was preempted, or the cached prefix (possibly empty); at least one token always runs."""
        if seq.parked is not None and (whole := self._state.match_parked(seq.parked, seq.chain)) is not None:
            return whole
        if not seq.request.reuse:
            return self._state.match(seq.chain, seq.tokens, 0)
        # Siblings fork before the last prompt token, also where this sequence continues tokens of another engine.
        return self._state.match(seq.chain, seq.tokens, (seq.prompt_len if seq.children else len(seq.tokens)) - 1)

    def reach(self, seq: Sequence) -> int:
        """Tokens that must fit when the sequence enters: the known ones, with the masks of a diffusion model."""
        return len(seq.tokens) if self._canvas is None else self._canvas.end(seq)

    def fitting(self, seq: Sequence, waiting: WaitingQueue, overtakes: bool) -> Match | None:
        """What it starts from, if it has room; if need be, those that wait give back what they hold, itself last. One
        that overtakes others leaves them what they hold, and what is on its way to them."""
        parking = self._parking
        if self._state.tiers is not None and parking.lacks_room(seq, waiting, bool(self._running)):
            return None
        promised = parking.promised() if overtakes else 0
        while (lack := self.lack(seq, match := self.match(seq), promised)) != (0, 0):
            if overtakes or not (
                parking.yield_memory(waiting, seq) or parking.yield_memory(waiting) or self._unpinned(*lack)
            ):
                return None
        return match

    def _unpinned(self, pages: int, slots: int) -> bool:
        """Whether pinned prefixes made room. They do not while a running sequence, or a step in flight, may do so."""
        state = self._state
        if self._running or not state.pins.all or state.pages.coming or state.slots.coming:
            return False
        return state.pins.relieve(pages, slots)

    def lack(self, seq: Sequence, match: Match, promised: int = 0) -> tuple[int, int]:
        """Pages and slots that are missing for it, if so many pages are promised to others."""
        # The headroom keeps the new sequence from being preempted, or preempting, with the very next token.
        reach, headroom = self.reach(seq), len(self._running)
        if self._policy.reserves_limit:
            reach, headroom = seq.request.limit, sum(map(self._growth, self._running))
        return self._state.lack(match, reach, self._config.step_tokens, headroom + promised)

    def _growth(self, seq: Sequence) -> int:
        """Pages that a running sequence may still need."""
        assert seq.state is not None
        largest = self._state.frames_for(seq.request.limit, self._config.step_tokens)
        return max(0, largest - self._state.held(seq.state))
