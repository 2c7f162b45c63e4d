"""The shortest time of steps of a loaded model on the machine it runs on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bankfull.layers.adapted import own_operands
from bankfull.limits.machine import ceilings as machine
from bankfull.limits.machine.ceilings import Ceilings
from bankfull.limits.meter.closed_form import ClosedForm, closed_form
from bankfull.limits.meter.metered import MeteredModel
from bankfull.limits.meter.roofline import Bound, bound_of
from bankfull.limits.meter.step import StepShape
from bankfull.llm import LLM
from bankfull.ops.cost import Cost, Operands, Rates
from bankfull.types import Work


@dataclass(frozen=True, slots=True)
class StepLimit:
    """The shortest times of a model's steps on given ceilings."""

    form: ClosedForm
    ceilings: Ceilings
    rates: Rates
    """Arithmetic peaks for the model's dtype."""
    drafted: Operands = "own"
    """Operands of a drafter's products."""

    @property
    def peak(self) -> float:
        """FLOP/s that a step of one token could reach, with its mix of operands; infinite if that is not known."""
        return self.form.cost(StepShape.decode()).peak(self.rates)

    def seconds(self, found: np.ndarray) -> float:
        """Shortest time of a step with these features."""
        return self.least(self.form.cost_of(found))

    def drafting(self, cost: Cost) -> float:
        """Shortest time of a drafter's products."""
        return self.least(cost.on(self.drafted))

    def least(self, cost: Cost) -> float:
        return cost.seconds(self.rates, self.ceilings.read_at(cost.read))

    def bound(self, found: np.ndarray) -> Bound:
        cost = self.form.cost_of(found)
        return bound_of(cost, self.rates, self.ceilings.read_at(cost.read))

    def features(self, work: Sequence[Work]) -> np.ndarray:
        return self.form.features(StepShape.of(work))

    def of_work(self, work: Sequence[Work]) -> float:
        return self.seconds(self.features(work)) if work else 0.0


def step_limit_of(llm: LLM, *, measure: bool) -> StepLimit | None:
    """None if the machine has no cached ceilings and may not be measured now, or has no memory for it."""
    device = llm.loaded.device
    ceilings = machine.of_device(device) if measure else machine.known_of(device)
    return None if ceilings is None else step_limit_on(llm, ceilings)


def step_limit_on(llm: LLM, ceilings: Ceilings) -> StepLimit:
    """The same for given ceilings."""
    metered = MeteredModel.of_build(llm.loaded.files, llm.loaded.build)
    drafted = own_operands(llm.loaded.build.activations)
    return StepLimit(closed_form(metered), ceilings, ceilings.rates(str(metered.dtype)), drafted)
