"""What each tenant may have where several want the engine at once: an equal part of rows, of pages, of a step's tokens.

A part that its owner does not use goes to the others, so nothing is left idle. The parts of a step need no memory of
earlier ones: whoever wants little gets it at once, whatever others want.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from bankfull.sched.sequence import Sequence
from bankfull.state.manager import StateManager

SLOTS_OF_A_ROW = 3
"""What a sequence of a recurrent model needs to go on: its state, and what two launched steps write."""


class Holdings:
    """Rows and pages of each tenant, and the equal parts that they are entitled to."""

    def __init__(self, running: Iterable[Sequence], state: StateManager, rows: int, tenants: int) -> None:
        self._state = state
        self.rows: Counter[str] = Counter()
        self.pages: Counter[str] = Counter()
        for seq in running:
            self.rows[seq.tenant] += 1
            self.pages[seq.tenant] += self._held(seq)
        self.fair_rows = max(1, rows // tenants)
        self.fair_pages = state.pages.size // tenants
        if state.slots.size:
            self.fair_rows = min(self.fair_rows, state.slots.size // tenants // SLOTS_OF_A_ROW)

    def _held(self, seq: Sequence) -> int:
        return 0 if seq.state is None else self._state.held(seq.state)

    def entitled(self, tenant: str, pages: int) -> bool:
        """May it have one more row and so many more pages at the cost of those who have more than their part?"""
        return self.rows[tenant] < self.fair_rows and self.pages[tenant] + pages <= self.fair_pages

    def excess(self, tenant: str) -> int:
        """Pages beyond its part."""
        return max(0, self.pages[tenant] - self.fair_pages)

    def beyond(self, running: list[Sequence]) -> list[Sequence]:
        """Sequences that tenants with more than their part would have to give up, the first to go last."""
        rows, pages, found = self.rows.copy(), self.pages.copy(), []
        for seq in reversed(running):
            if rows[seq.tenant] > self.fair_rows or pages[seq.tenant] > self.fair_pages:
                rows[seq.tenant] -= 1
                pages[seq.tenant] -= self._held(seq)
                found.append(seq)
        return found[::-1]


def parts_of(wants: Mapping[str, int], turns: Mapping[str, int], tokens: int) -> dict[str, int]:
    """How `tokens` are divided: nobody gets more than it wants, and who gets less than that gets no less than anybody
    else. In the order in which they are taken; of those who want too much, whoever has waited longest is first."""
    level, left = 0, tokens
    for number, want in enumerate(sorted(wants.values())):
        level = left // (len(wants) - number)
        if want > level:
            break
        left -= want
    parts = {tenant: min(want, level) for tenant, want in wants.items()}
    tokens -= sum(parts.values())
    for tenant in sorted(wants, key=lambda tenant: turns.get(tenant, -1)):  # what no equal division can give
        if tokens and parts[tenant] < wants[tenant]:
            parts[tenant] += 1
            tokens -= 1
    return dict(sorted(parts.items(), key=lambda part: (part[1] < wants[part[0]], turns.get(part[0], -1))))


def wants_of(filling: Iterable[Sequence], waiting: Iterable[Sequence]) -> Counter[str]:
    """Tokens of prompts that each tenant could run now; those that a cached prefix saves count, too."""
    wants: Counter[str] = Counter()
    for seq in filling:
        wants[seq.tenant] += seq.missing
    for seq in waiting:
        wants[seq.tenant] += len(seq.tokens)
    return wants


def first_of_each(waiting: Iterable[Sequence]) -> Iterator[Sequence]:
    """The first in line of each tenant."""
    seen: set[str] = set()
    for seq in waiting:
        if seq.tenant not in seen:
            seen.add(seq.tenant)
            yield seq
