"""Priorities, with equal shares for tenants: lower numbers run first, and running sequences give way to them.

A priority counts within one tenant only: a tenant cannot take another tenant's share by raising its own priorities.
"""

from __future__ import annotations

from bankfull.sched.policies.fcfs import FirstCome
from bankfull.sched.policy import BATCH_PRIORITY
from bankfull.sched.sequence import Order, Sequence
from bankfull.sched.shares import Holdings
from bankfull.types import Request


class Priority(FirstCome):
    preemptive = True
    fair = True

    def is_batch(self, request: Request) -> bool:
        return request.priority >= BATCH_PRIORITY

    def rank(self, sequence: Sequence, now: float) -> float:
        return sequence.priority

    def giving_way(self, head: Sequence, running: list[Sequence], beyond: list[Sequence] | None) -> list[Sequence]:
        if beyond is None:
            return [s for s in running if s.priority > head.priority]
        lower = [s for s in running if s.batch > head.batch or (s.tenant == head.tenant and s.priority > head.priority)]
        return beyond + lower

    def victim(self, needy: Sequence, able: list[Sequence], holdings: Holdings | None) -> Sequence | None:
        if holdings is None:
            return super().victim(needy, able, None)

        def weight(one: Sequence) -> tuple[bool, int, Order]:
            """Batch work goes first, then the tenant that holds most beyond its share."""
            return one.batch, holdings.excess(one.tenant), one.order

        heaviest = max(able, key=weight, default=needy)
        return heaviest if weight(heaviest) > weight(needy) else None
