"""Fair queueing among tenants (API keys), by weight: each gets service in proportion, whatever the others ask for.

Every tenant has a counter of the service that it got, in tokens over its weight; a generated token counts as much as
several prompt tokens. A request is ranked by the counter that its tenant will have when the requests before it are
served. A tenant that comes back after a pause starts from the least counter of the others: a pause earns nothing.
When a sequence ends, the counter is corrected by what it has really cost (the deficit).
"""

from __future__ import annotations

from collections.abc import Iterable

from bankfull.config import SchedConfig
from bankfull.sched.policies.fcfs import FirstCome
from bankfull.sched.policy import BATCH_PRIORITY
from bankfull.sched.sequence import Sequence
from bankfull.types import Request, StepPlan

OUTPUT_COST = 4.0
"""Cost of a generated token, in prompt tokens."""


class Fair(FirstCome):
    def __init__(self, config: SchedConfig) -> None:
        super().__init__(config)
        self._weights = dict(config.weights)
        self.served: dict[str, float] = {}
        """Tenant -> service over its weight, of tenants that have sequences."""
        self._promised: dict[str, float] = {}
        """Tenant -> its counter after all of its waiting sequences."""
        self._expected: dict[Sequence, float] = {}
        """What each sequence is expected to cost, minus what it has cost."""
        self._least = 0.0

    def is_batch(self, request: Request) -> bool:
        return request.priority >= BATCH_PRIORITY

    def weight_of(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def rank(self, sequence: Sequence, now: float) -> float:
        tenant = sequence.tenant
        if tenant not in self.served:
            self.served[tenant] = self._promised[tenant] = max(self._least, self._lowest())
        if sequence in self._expected:
            return sequence.order[1]
        request = sequence.request
        cost = (len(request.prompt) + OUTPUT_COST * (request.limit - len(request.prompt))) / self.weight_of(tenant)
        self._expected[sequence] = cost
        start = max(self._promised[tenant], self._lowest())
        self._promised[tenant] = start + cost
        return start

    def _lowest(self) -> float:
        return min(self.served.values(), default=self._least)

    def after(self, plan: StepPlan, served: list[Sequence], now: float, seconds: float) -> Iterable[Sequence]:
        weights, expected = self._weights, self._expected
        for work, seq in zip(plan.work, served, strict=True):
            if seq in expected:
                tenant = seq.request.tenant
                cost = (work.count - 1 + OUTPUT_COST if work.sample else work.count) / weights.get(tenant, 1.0)
                self.served[tenant] += cost
                expected[seq] -= cost
        self._least = max(self._least, self._lowest())
        return ()

    def ended(self, sequence: Sequence) -> None:
        left, tenant = self._expected.pop(sequence, None), sequence.tenant
        if left is None:
            return
        # The end came sooner or later than promised: later requests of the tenant are ranked by what is true.
        self._promised[tenant] -= left
        if not any(seq.tenant == tenant for seq in self._expected):
            self._least = max(self._least, min(self.served.values()))
            del self.served[tenant], self._promised[tenant]
