"""After a step that found too little memory: which request was the cause.

Nothing of such a step has happened: its sequences were preempted. Then its requests run alone, the one with most work
in that step first, each until it has passed what it had reached there. A request whose step fails alone is the cause,
and ends; if all pass, they were too much together, and each has made progress.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from bankfull.sched.sequence import Sequence
from bankfull.types import Work


@dataclass(slots=True, eq=False)
class _Suspect:
    request: Hashable
    tokens: int = 0
    """Tokens that the request had in the step."""
    logits: int = 0
    goals: list[tuple[Sequence, int, int]] = field(default_factory=list)
    """The request's sequences, and the computed and known tokens after which they have passed the step."""

    def passed(self, alive: Iterable[Sequence]) -> bool:
        left = set(map(id, alive))
        return all(
            id(s) not in left or (s.computed >= done and len(s.tokens) >= known) for s, done, known in self.goals
        )


class Isolation:
    def __init__(self, by_request: dict[Hashable, list[Sequence]], whole: bool) -> None:
        """`by_request`: the unfinished sequences of each request, the scheduler's own. `whole`: what runs in a step
        cannot be cut smaller."""
        self._by_request, self._whole = by_request, whole
        self._suspects: deque[_Suspect] = deque()
        self._half = 0
        """Half the tokens of the failed step."""

    def suspect(self, work: Iterable[tuple[Work, Sequence]]) -> Hashable | None:
        """The sequences of a failed step, before they are preempted. The request that was alone in it is the cause, and
        is returned; then the others are cleared."""
        suspects: dict[Hashable, _Suspect] = {}
        for share, seq in work:
            one = suspects.setdefault(seq.request.id, _Suspect(seq.request.id))
            one.tokens += share.count + share.drafts
            one.logits += share.count if seq.request.scored else share.lines
            one.goals.append((seq, share.start + share.count, len(seq.tokens) + share.sample))
        if len(suspects) == 1:
            self._suspects.clear()
            return next(iter(suspects))
        self._half = sum(one.tokens for one in suspects.values()) // 2
        # Those of an earlier failed step that are left here too are among these, and those that are not must wait.
        others = [one for one in self._suspects if one.request not in suspects]
        self._suspects = deque([*sorted(suspects.values(), key=lambda one: -(one.tokens + one.logits)), *others])
        return None

    @property
    def alone(self) -> Hashable | None:
        """The request that runs alone now; None: all may run."""
        while self._suspects and self._suspects[0].passed(self._by_request.get(self._suspects[0].request, ())):
            self._suspects.popleft()
        return self._suspects[0].request if self._suspects else None

    def budget(self, tokens: int) -> int:
        """Tokens of the next step, which otherwise has so many: alone, a request gets no more than a smaller step's."""
        if self._whole or not self._suspects:
            return tokens
        return min(tokens, max(self._suspects[0].tokens, self._half))

    def skip(self) -> bool:
        """The request cannot run alone now. False if none does."""
        if not self._suspects:
            return False
        self._suspects.popleft()
        return True
