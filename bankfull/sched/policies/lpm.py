"""Longest prefix match first: waiting sequences whose prompts are cached run before their pages are evicted.

A sequence that has waited for `starvation` seconds comes first, whatever is cached.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from bankfull.config import SchedConfig
from bankfull.sched.policies.fcfs import FirstCome
from bankfull.sched.policy import BATCH_PRIORITY
from bankfull.sched.sequence import Sequence
from bankfull.types import Request, StepPlan

MOST_RANKED = 128
"""Waiting sequences that are ranked again after a step, the first ones in order."""


class LongestPrefix(FirstCome):
    def __init__(self, config: SchedConfig) -> None:
        super().__init__(config)
        self.starvation = config.starvation

    def is_batch(self, request: Request) -> bool:
        return request.priority >= BATCH_PRIORITY

    def rank(self, sequence: Sequence, now: float) -> float:
        if sequence.admitted or now - sequence.queued_at >= self.starvation:
            return -float("inf")  # what it has computed must not be for nothing
        return -float(self.facts.cached(sequence))

    def after(self, plan: StepPlan, served: list[Sequence], now: float, seconds: float) -> Iterable[Sequence]:
        return list(islice(self.facts.waiting, MOST_RANKED))
