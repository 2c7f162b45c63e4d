"""Time of a captured step by kernel, beside the shortest time of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bankfull.limits.meter.closed_form import STEPS, TOKENS, forms_by_operation
from bankfull.limits.meter.metered import HEAD
from bankfull.limits.meter.step import StepShape
from bankfull.limits.statistics import per_second
from bankfull.ops.cost import Cost

if TYPE_CHECKING:
    from bankfull.limits.machine.ceilings import Ceilings
    from bankfull.limits.meter.metered import MeteredModel
    from bankfull.ops.native.tape.traffic import Traffic

Spent = Mapping[str, tuple[float, int]]
"""Label -> seconds and runs."""
Row = dict[str, str | float | None]
HOST, STEP = "host", "step"
"""Row labels: time outside of kernels, and the whole step."""


@dataclass(frozen=True, slots=True)
class Kernel:
    label: str
    seconds: float
    runs: int
    costs: tuple[Cost, ...]
    """Cost of all its runs in each step."""


@dataclass(frozen=True, slots=True)
class PhaseProfile:
    """The profile of one phase of a repetition."""

    name: str
    seconds: float
    kernels: tuple[Kernel, ...]
    """Longest first."""
    costs: tuple[Cost, ...]
    """Cost of each whole step by the meter, operation by operation, without the savings of fused kernels."""

    @property
    def steps(self) -> int:
        return len(self.costs)

    def rows(self, ceilings: Ceilings | None, dtype: str) -> list[Row]:
        """One row for each kernel, then the host's, then the step's; times are averages per step."""
        rows = [self._row(k.label, k.seconds, k.runs, k.costs, ceilings, dtype) for k in self.kernels]
        host = max(0.0, self.seconds - sum(kernel.seconds for kernel in self.kernels))
        rows.append(self._row(HOST, host, None, (), ceilings, dtype))
        rows.append(self._row(STEP, self.seconds, None, self.costs, ceilings, dtype))
        return rows

    def _row(
        self,
        label: str,
        seconds: float,
        runs: int | None,
        costs: Sequence[Cost],
        ceilings: Ceilings | None,
        dtype: str,
    ) -> Row:
        total = sum(costs, Cost())
        least = None
        if ceilings is not None and total != Cost():
            # The working set is everything that a step reads: it decides at which cache level the weights stay.
            reach, rates = (ceilings.read_at(step.read) for step in self.costs), ceilings.rates(dtype)
            least = sum(cost.seconds(rates, bandwidth) for cost, bandwidth in zip(costs, reach, strict=True))
        return {
            "kernel": label,
            "runs_per_step": None if runs is None else runs / self.steps,
            "seconds_per_step": seconds / self.steps,
            "share": seconds / self.seconds if self.seconds else None,
            "bytes_per_s": per_second(total.bytes, seconds),
            "flop_per_s": per_second(total.flops, seconds),
            "least_seconds_per_step": None if least is None else least / self.steps,
            "percent_of_limit": None if least is None or not seconds else 100 * least / seconds,
        }


class KernelCosts:
    """Costs of the kernels of one tape in a step: from the tape where they follow from the number of tokens, else from
    the meter."""

    def __init__(self, model: MeteredModel, traffic: Mapping[str, Traffic]) -> None:
        self._traffic = traffic
        self._calls = model.cost(StepShape.decode()).calls
        self._forms = forms_by_operation(model)
        self._features = next(iter(self._forms.values())).features

    def of(self, label: str, step: StepShape) -> Cost:
        return self.summed(label, self._features(step))

    def summed(self, label: str, found: np.ndarray) -> Cost:
        """The cost from features, which may be sums over steps."""
        if label == HEAD:
            forms = (form for name, form in self._forms.items() if name.startswith(f"{HEAD}/"))
            return sum((form.cost_of(found) for form in forms), Cost())
        traffic, steps, tokens = self._traffic[label], float(found[STEPS]), float(found[TOKENS])
        if not traffic.operation:
            cost = Cost(traffic.flops * tokens, traffic.fixed * steps + traffic.per_token * tokens)
            return cost.on(traffic.operands)
        # Some calls of an operation may be on the tape, others breaks in it; they share its cost evenly.
        share = traffic.count / self._calls[traffic.operation]
        return self._forms[traffic.operation].cost_of(found) * share

    def part(
        self, name: str, seconds: float, spent: Spent, steps: Sequence[StepShape], costs: Sequence[Cost]
    ) -> PhaseProfile:
        kernels = [
            Kernel(label, taken, runs, tuple(self.of(label, step) for step in steps))
            for label, (taken, runs) in spent.items()
        ]
        kernels.sort(key=lambda kernel: -kernel.seconds)
        return PhaseProfile(name, seconds, tuple(kernels), tuple(costs))
