"""First come, first served: the order of arrival, without regard to priorities and tenants."""

from __future__ import annotations

from collections.abc import Iterable

from bankfull.config import SchedConfig
from bankfull.sched.gates import gate_of
from bankfull.sched.queue_facts import QueueFacts
from bankfull.sched.sequence import Sequence
from bankfull.sched.shares import Holdings
from bankfull.types import Request, StepPlan


class FirstCome:
    """Static and dynamic batching are this policy behind another admission gate."""

    preemptive = False
    fair = False
    reserves_limit = False
    predicts = False
    facts: QueueFacts

    def __init__(self, config: SchedConfig) -> None:
        self.gate = gate_of(config)

    def is_batch(self, request: Request) -> bool:
        return False

    def rank(self, sequence: Sequence, now: float) -> float:
        return 0.0

    def giving_way(self, head: Sequence, running: list[Sequence], beyond: list[Sequence] | None) -> list[Sequence]:
        return []

    def victim(self, needy: Sequence, able: list[Sequence], holdings: Holdings | None) -> Sequence | None:
        return able[-1] if able and able[-1].order > needy.order else None

    def after(self, plan: StepPlan, served: list[Sequence], now: float, seconds: float) -> Iterable[Sequence]:
        return ()

    def next_turn(self, sequence: Sequence, now: float) -> float:
        """Returns numbers by the order alone: they mean no seconds, but their order is right."""
        _, rank, arrival = sequence.order
        return rank + arrival * 1e-9

    def backlog(self) -> list[float]:
        return []

    def ended(self, sequence: Sequence) -> None:
        pass


class Orca(FirstCome):
    """Orca's scheduler: sequences are admitted in the order of arrival, with memory for their largest lengths, and run
    to their ends."""

    reserves_limit = True
