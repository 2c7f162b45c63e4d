"""One sequence on its way: tokens that are computed chase tokens that are known."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from bankfull.sched.policy import Rank
from bankfull.state.manager import SequenceState
from bankfull.state.prefix import Chain
from bankfull.types import Request, Work


@dataclass(slots=True, eq=False)
class Sequence:
    request: Request
    child: int
    rank: Rank
    """Unique, and kept through preemption."""
    queued_at: float
    chain: Chain
    tokens: list[int]
    yields: bool = False
    """Batch work: gets no tokens in a step that carries an online prompt."""
    parent: Sequence | None = None
    """n > 1: the sibling whose prompt pages this one waits to share; None once it stands on its own feet."""
    children: list[Sequence] = field(default_factory=list)
    """Siblings that wait for this sequence's prompt."""
    computed: int = 0
    """Tokens whose state is settled."""
    flying: deque[Work] = field(default_factory=deque)
    """Work that is launched and not settled, oldest first. What is not here any more was given up: its result is
    dropped, also when the sequence has meanwhile come back to the same row."""
    start: int = 0
    """Lower bound of the tokens that will be computed once the launched work has settled."""
    sampled: int = 0
    """Launched work that will give at least one token each."""
    drafted: int = 0
    """Launched drafts: each may turn out accepted, or not."""
    state: SequenceState | None = None
    row: int = -1
    turn: int = -1
    """The last step that it had a part in."""
    admitted: bool = False
    cached: int = 0

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def tenant(self) -> str:
        return self.request.tenant

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    @property
    def scored(self) -> bool:
        """Does its next token go through the head although it is not the last one?"""
        return self.request.scored and self.start < self.prompt_len - 1

    @property
    def known(self) -> int:
        """Lower bound of the tokens that will be known once the launched work has settled."""
        return len(self.tokens) + self.sampled

    @property
    def missing(self) -> int:
        """Known tokens that no launched work computes. Drafts in flight move both bounds alike, so this is exact."""
        return len(self.tokens) + self.sampled - self.start

    def launch(self, work: Work) -> None:
        self.flying.append(work)
        self.start += work.count
        self.drafted += work.drafts
        self.sampled += work.sample

    def land(self, accepted: int) -> None:
        """The oldest launched work has settled with `accepted` drafts."""
        work = self.flying.popleft()
        self.computed += work.count + accepted
        self.start += accepted
        self.drafted -= work.drafts
        self.sampled -= work.sample

    def begin(self, row: int, state: SequenceState, computed: int) -> None:
        self.row, self.state, self.computed, self.start = row, state, computed, computed

    def give_up(self) -> None:
        """Without row and state; the tokens stay, and will be computed again."""
        self.row, self.state, self.computed, self.start, self.sampled, self.drafted = -1, None, 0, 0, 0, 0
        self.flying.clear()
