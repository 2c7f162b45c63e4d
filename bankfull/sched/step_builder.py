"""A step while it is being planned: what was given out, and what is left to give."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from bankfull.sched.pace import Room
from bankfull.sched.sequence import Sequence
from bankfull.state.sequence_state import Reserved
from bankfull.types import PageEdit, StepPlan, Work


@dataclass(slots=True)
class StepBuilder:
    plan: StepPlan
    budget: int
    """Tokens that may still be given out."""
    quota: int
    """New sequences that the gate still admits."""
    prompt_tokens: int
    """Tokens of prompts that may still be given out."""
    prompt_rows: int
    """Sequences that may still get tokens of their prompts."""
    room: Room | None = None
    """Time that is left for prompts; None if only the token budget limits them."""
    spare: int = 0
    """Tokens of the budget that drafts may take without delaying a decode."""
    batch: bool = False
    """Whether batch work is being served."""
    claims: list[Sequence] = field(default_factory=list)
    """Waiting sequences of tenants below their share: until these are admitted, no other tenant's are."""
    prompts: bool = False
    """Whether the step carries an online prompt, whose user waits for the first token."""
    decodes: int = 0
    """Running sequences that decode in the step."""
    served: list[Sequence] = field(default_factory=list)
    """Sequences that the step serves, in the order of plan.work."""
    fixed: set[int] = field(default_factory=set)
    """Rows that the plan already mentions: their sequences can no longer be preempted in this step."""

    @property
    def prompt_budget(self) -> int:
        """Tokens that one more prompt may get."""
        return self.prompt_tokens if self.prompt_rows > 0 else 0

    def give(self, seq: Sequence, work: Work, reserved: Reserved) -> None:
        """Make `work` part of the step, in the places reserved for it."""
        plan, row = self.plan, work.row
        work.slots = reserved.slots
        if reserved.pages:
            plan.pages += [PageEdit(group, row, first, pages) for group, first, pages in reserved.pages]
        plan.work.append(work)
        self.served.append(seq)
        self.fixed.add(row)
        self.budget -= work.count + work.drafts
        if work.count > 1:
            self.prompt_tokens -= work.count
            self.prompt_rows -= 1
        self.spare -= work.drafts
        seq.turn = plan.step
        seq.launch(work)

    @contextmanager
    def budget_of(self, tokens: int) -> Iterator[None]:
        """Limits what is given out inside the block to `tokens`."""
        kept = max(0, self.budget - tokens)
        self.budget -= kept
        try:
            yield
        finally:
            self.budget += kept
