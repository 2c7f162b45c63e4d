"""The shortest time of steps of a loaded model on the machine it runs on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bankfull.limits.machine import ceilings as machine
from bankfull.limits.machine.ceilings import Ceilings
from bankfull.limits.meter.closed_form import ClosedForm, closed_form
from bankfull.limits.meter.metered import MeteredModel
from bankfull.limits.meter.roofline import Bound, bound_of
from bankfull.limits.meter.step import StepShape
from bankfull.llm import LLM
from bankfull.ops.cost import Cost
from bankfull.types import Work


@dataclass(frozen=True, slots=True)
class StepLimit:
    """The shortest times of a model's steps on given ceilings."""

    form: ClosedForm
    ceilings: Ceilings
    peak: float
    """Arithmetic peak in FLOP/s for the model's dtype and activations."""

    def seconds(self, found: np.ndarray) -> float:
        """Shortest time of a step with these features."""
        return self.least(self.form.cost_of(found))

    def least(self, cost: Cost) -> float:
        return cost.seconds(self.peak, self.ceilings.read_at(cost.read))

    def bound(self, found: np.ndarray) -> Bound:
        cost = self.form.cost_of(found)
        return bound_of(cost, self.peak, self.ceilings.read_at(cost.read))

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
    loaded = llm.loaded
    dtype, activations = str(loaded.build.dtype).removeprefix("torch."), loaded.kit.activations
    metered = MeteredModel(
        loaded.files, dtype=dtype, expand=loaded.build.expand, kv_dtype=loaded.build.kv_dtype, activations=activations
    )
    return StepLimit(closed_form(metered), ceilings, ceilings.peak_of(dtype, activations))
