"""Shares of tenants and of batch work: equal rows, pages and step tokens for each tenant that competes for them.

A share that its tenant does not use goes to the others, so nothing stays idle. The shares of a step depend on that step
alone: a tenant that wants little gets it at once, whatever the others want.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from bankfull.sched.sequence import Sequence
from bankfull.state.manager import StateManager

SLOTS_OF_A_ROW = 3
"""Slots that a running sequence of a recurrent model needs: its state, and one for each of two launched steps."""

COMPANY_STEPS = 256
"""Batch work yields for this many steps after the last online request."""


def batch_share(step_tokens: int, decoding: int, company: bool) -> tuple[int, int]:
    """What batch work may take of a step: rows that decode, and tokens in all; `company`: online work came lately.

    A request that arrives waits for the end of the step, so the step has to be short: a prompt loses little by being
    cut into more chunks. In company, batch rows also decode in turns, which costs a batch a little; without company,
    none is held back.
    """
    few = max(1, step_tokens // 16)
    return (few, 2 * few) if company else (decoding, max(step_tokens // 4, decoding + few))


ALTERNATION_SECONDS = 60.0
"""Tenants share the engine for this long after the last request of another tenant than the one before."""


class Tenants:
    """The tenants that have unfinished sequences, and when each one's prompts were last served."""

    def __init__(self, fair: bool) -> None:
        """`fair`: whether the policy gives them equal shares."""
        self._fair = fair
        self._sequences: Counter[str] = Counter()
        self._turns: dict[str, int] = {}
        self._latest: str | None = None
        self._alternated_at = -math.inf

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def compete(self) -> bool:
        return self._fair and len(self._sequences) > 1

    def alternate(self, now: float) -> bool:
        """Whether requests of several tenants arrived lately: another one may arrive during the next step."""
        return self._fair and now - self._alternated_at < ALTERNATION_SECONDS

    def add(self, tenant: str, sequences: int, now: float) -> None:
        self._sequences[tenant] += sequences
        if self._latest not in (None, tenant):
            self._alternated_at = now
        self._latest = tenant

    def end(self, tenant: str) -> None:
        """One of its sequences has ended."""
        self._sequences[tenant] -= 1
        if not self._sequences[tenant]:
            del self._sequences[tenant]
            self._turns.pop(tenant, None)

    def served(self, tenant: str, step: int) -> None:
        self._turns[tenant] = step

    def shares(self, filling: Iterable[Sequence], waiting: Iterable[Sequence], tokens: int) -> dict[str, int]:
        """How `tokens` are divided among those whose prompts run or wait; those a cached prefix saves count, too."""
        wants: Counter[str] = Counter()
        for seq in filling:
            wants[seq.tenant] += seq.missing
        for seq in waiting:
            wants[seq.tenant] += len(seq.tokens)
        return divide(tokens, wants, self._turns)


class Holdings:
    """Rows and pages of each tenant, and the equal shares that they are entitled to."""

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
        """Whether the tenant may take one more row and `pages` more pages from tenants beyond their shares."""
        return self.rows[tenant] < self.fair_rows and self.pages[tenant] + pages <= self.fair_pages

    def excess(self, tenant: str) -> int:
        """Pages beyond the tenant's share."""
        return max(0, self.pages[tenant] - self.fair_pages)

    def beyond(self, running: list[Sequence]) -> list[Sequence]:
        """The sequences that tenants beyond their shares would lose; the last one of the list goes first."""
        rows, pages, lost = self.rows.copy(), self.pages.copy(), []
        for seq in reversed(running):
            if rows[seq.tenant] > self.fair_rows or pages[seq.tenant] > self.fair_pages:
                rows[seq.tenant] -= 1
                pages[seq.tenant] -= self._held(seq)
                lost.append(seq)
        return lost[::-1]


def divide(tokens: int, wants: Mapping[str, int], turns: Mapping[str, int]) -> dict[str, int]:
    """Max-min fair division of `tokens`: a tenant gets at most what it wants, and a tenant that gets less than it wants
    gets at least as much as any other. In the order in which they are served: satisfied tenants first, then by their
    last turn, the oldest first."""
    level, left = 0, tokens
    for number, want in enumerate(sorted(wants.values())):
        level = left // (len(wants) - number)
        if want > level:
            break
        left -= want
    shares = {tenant: min(want, level) for tenant, want in wants.items()}
    tokens -= sum(shares.values())
    for tenant in sorted(wants, key=lambda tenant: turns.get(tenant, -1)):  # the remainder of the division
        if tokens and shares[tenant] < wants[tenant]:
            shares[tenant] += 1
            tokens -= 1
    return dict(sorted(shares.items(), key=lambda share: (share[1] < wants[share[0]], turns.get(share[0], -1))))


def first_of_each(waiting: Iterable[Sequence]) -> Iterator[Sequence]:
    """The first waiting sequence of each tenant."""
    seen: set[str] = set()
    for seq in waiting:
        if seq.tenant not in seen:
            seen.add(seq.tenant)
            yield seq
