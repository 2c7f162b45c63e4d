"""The contract of a scheduling policy: which sequence runs first, which one gives way, which one is preempted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from bankfull.sched.gates import Gate
from bankfull.types import Request, StepPlan

if TYPE_CHECKING:
    from bankfull.sched.queue_facts import QueueFacts
    from bankfull.sched.sequence import Sequence
    from bankfull.sched.shares import Holdings

BATCH_PRIORITY = 1_000_000
"""Requests of this priority number and above are batch work: no user waits for their next token."""


class Policy(Protocol):
    """Decides from sequences and what it may ask of the queue; the scheduler owns queues, memory and token budgets."""

    gate: Gate
    """How many sequences may be admitted in a step."""
    preemptive: bool
    """Whether running sequences give way to waiting ones (`giving_way`)."""
    fair: bool
    """Whether tenants that compete get equal shares of rows, pages and step tokens."""
    reserves_limit: bool
    """Whether a sequence is admitted only if memory suffices for all sequences at their largest length."""
    predicts: bool
    """Whether it asks for predicted prefill times, so that steps have to be timed."""
    facts: QueueFacts
    """Set by the scheduler."""

    def is_batch(self, request: Request) -> bool:
        """Whether the request is batch work: served after all other work, and not in a step with an online prompt."""
        ...

    def rank(self, sequence: Sequence, now: float) -> float:
        """Smaller runs first and is preempted last; among equals, arrival decides. Called when a sequence is queued,
        and again for each sequence that `after` returns."""
        ...

    def giving_way(self, head: Sequence, running: list[Sequence], beyond: list[Sequence] | None) -> list[Sequence]:
        """The running sequences that may be preempted to admit `head`, the first waiting one; the scheduler takes them
        from the end of the list. `beyond`: where tenants compete, the sequences beyond their tenants' shares that
        `head` has a right to replace; None where they do not."""
        ...

    def victim(self, needy: Sequence, able: list[Sequence], holdings: Holdings | None) -> Sequence | None:
        """The sequence among `able` (in running order) to preempt so that `needy`, which runs, gets memory; None if
        `needy` has to wait. `holdings`: what each tenant holds, where tenants compete and pages are short."""
        ...

    def after(self, plan: StepPlan, served: list[Sequence], now: float, seconds: float) -> Iterable[Sequence]:
        """Called when a step has settled; `served[i]` had `plan.work[i]`, and the device spent `seconds` on it. Returns
        the sequences whose rank has changed; those that have ended are ignored."""
        ...

    def next_turn(self, sequence: Sequence, now: float) -> float:
        """Estimated seconds until a waiting sequence runs again: the last one leaves the device first, and the first
        one comes back first."""
        ...

    def backlog(self) -> list[float]:
        """Seconds of quanta that the sequences of each queue have left, the first queue first; empty without queues."""
        ...

    def ended(self, sequence: Sequence) -> None:
        """The sequence will not be seen again."""
        ...
