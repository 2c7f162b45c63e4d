"""The gain of speculative decoding that a planned configuration would have, with its likely step times."""

from __future__ import annotations

from bankfull.limits.model.drafters import DrafterChoice, DraftTimes, forecast_of
from bankfull.limits.model.recipe import Recipe
from bankfull.limits.model.speculation import GainForecast, Seconds
from bankfull.ops.cost import Cost
from bankfull.plan.calibrate import step_times
from bankfull.plan.configurations import Configuration
from bankfull.plan.step_times import ARITHMETIC, LINEAR, MEMORY
from bankfull.plan.traffic import TrafficSpec


def planned_gain(configuration: Configuration, drafter: DrafterChoice, traffic: TrafficSpec) -> GainForecast:
    """The forecast at the traffic's mean context: the prompt and half of the answer."""
    prepared, times = configuration.prepared, configuration.times
    kind = configuration.site.kind
    factors = times.efficiency.factors

    def of_drafter(recipe: Recipe) -> Seconds:
        drafter_times = step_times(recipe, kind, times.efficiency, times.ceilings)
        # A pass of the drafter is part of a step: the step's fixed cost is counted once.
        return lambda step: drafter_times.likely(step) - drafter_times.overhead(len(step.counts))

    def of_product(cost: Cost) -> float:
        memory = cost.bytes / times.ceilings.read_at(cost.read) / factors[f"{LINEAR}: {MEMORY}"]
        arithmetic = times.arithmetic(cost) / factors[f"{LINEAR}: {ARITHMETIC}"]
        return max(memory, arithmetic) if times.overlaps else memory + arithmetic

    context = round(traffic.prompt.mean + traffic.output.mean / 2)
    draft_times = DraftTimes(lambda recipe: times.likely, of_drafter, of_product)
    return forecast_of(drafter, prepared.recipe, kind, draft_times, max(1, context))
