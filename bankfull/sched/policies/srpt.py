"""Shortest remaining processing time: the least that any order can reach in the mean, with lengths known beforehand.

A request's limit is taken for its length, which is true for requests that ignore end tokens. It is the oracle that
other policies are compared with, and a good policy where lengths are known.
"""

from __future__ import annotations

from collections.abc import Iterable

from bankfull.sched.policies.fcfs import FirstCome
from bankfull.sched.policy import BATCH_PRIORITY
from bankfull.sched.sequence import Sequence
from bankfull.types import Request, StepPlan

PROMPT_SHARE = 1 / 32
"""Cost of a prompt token, as a fraction of a generated one's, while no measurement tells."""


class Srpt(FirstCome):
    preemptive = True

    def is_batch(self, request: Request) -> bool:
        return request.priority >= BATCH_PRIORITY

    def rank(self, sequence: Sequence, now: float) -> float:
        """Remaining tokens, in steps of one generated token."""
        left = max(0, sequence.request.limit - len(sequence.tokens)) if sequence.request.generates else 0
        return left + PROMPT_SHARE * max(0, sequence.prompt_len - sequence.computed)

    def giving_way(self, head: Sequence, running: list[Sequence], beyond: list[Sequence] | None) -> list[Sequence]:
        return [seq for seq in running if seq.order > head.order]

    def after(self, plan: StepPlan, served: list[Sequence], now: float, seconds: float) -> Iterable[Sequence]:
        return served  # they come nearer to their ends at the same rate, and nearer than those that wait
