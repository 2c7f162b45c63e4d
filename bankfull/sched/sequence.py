"""One sequence on its way: tokens that are computed chase tokens that are known."""

from __future__ import annotations

from dataclasses import dataclass, field

from bankfull.state.manager import SequenceState
from bankfull.state.prefix import Chain
from bankfull.types import Finish, Request, Work


@dataclass(slots=True, eq=False)
class Sequence:
    request: Request
    child: int
    order: int
    """Arrival number: unique, and kept through preemption."""
    queued_at: float
    chain: Chain
    tokens: list[int]
    parent: Sequence | None = None
    """n > 1: the sibling whose prompt pages this one waits to share; None once it stands on its own feet."""
    children: list[Sequence] = field(default_factory=list)
    """Siblings that wait for this sequence's prompt."""
    computed: int = 0
    """Tokens whose state is settled."""
    flying: list[Work] = field(default_factory=list)
    """Work that is launched and not settled, oldest first."""
    state: SequenceState | None = None
    row: int = -1
    generation: int = 0
    """Grows whenever the row is given up: results of an older generation are dropped."""
    admitted: bool = False
    cached: int = 0
    finish: Finish | None = None

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    @property
    def sampled(self) -> int:
        """Launched work that will give at least one token each."""
        return sum(1 for w in self.flying if w.sample)

    @property
    def drafted(self) -> int:
        """Launched drafts: each may turn out accepted, or not."""
        return sum(w.drafts for w in self.flying)

    @property
    def start(self) -> int:
        """Lower bound of the tokens that will be computed once the launched work has settled."""
        return self.computed + sum(w.count for w in self.flying)

    @property
    def known(self) -> int:
        """Lower bound of the tokens that will be known then; they exceed `start` by exactly what is missing."""
        return len(self.tokens) + self.sampled
