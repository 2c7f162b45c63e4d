"""Prefill times before any was measured, from the closed form of the model's costs and the machine's ceilings.

The scheduler lies below this layer, so that it is given the prediction: `bankfull.prepare` calls `foresee` for every
`LLM` whose policy or tiers ask for it. The measured pace replaces it with the first prompt that is timed.
"""

from __future__ import annotations

import logging

from bankfull.errors import BankfullError
from bankfull.limits.meter.step import StepShape
from bankfull.limits.meter.step_limit import StepLimit, step_limit_of
from bankfull.llm import LLM

log = logging.getLogger("bankfull")

REACHED = 0.5
"""Share of the limit that a prompt is taken to reach: those of docs/results-*.md reach a quarter to four fifths."""


class PrefillForecast:
    """Seconds of a prompt's tokens, in steps of `step_tokens`."""

    def __init__(self, step_limit: StepLimit, step_tokens: int) -> None:
        self._limit, self._step_tokens = step_limit, step_tokens

    def __call__(self, start: int, end: int) -> float:
        seconds = 0.0
        for begin in range(start, end, self._step_tokens):
            tokens = min(self._step_tokens, end - begin)
            seconds += self._limit.seconds(self._limit.form.features(StepShape.prefill(tokens, past=begin)))
        return seconds / REACHED


def foresee(llm: LLM) -> None:
    """Give the scheduler a prediction, if it would ask for one and the ceilings are known. They are not measured here:
    that takes seconds and an idle device."""
    scheduler = llm.loaded.engine.scheduler
    if not scheduler.predicts or scheduler.pace.forecast is not None:
        return
    why = "this machine's limits were never measured (`bankfull limits` does that once)"
    try:
        step_limit = step_limit_of(llm, measure=False)
    except BankfullError as error:  # a model may run without a meter
        step_limit, why = None, str(error).rstrip(".")
    if step_limit is not None:
        config = scheduler.config
        scheduler.pace.forecast = PrefillForecast(step_limit, min(config.prompt_limits[0], config.step_tokens))
    elif scheduler.policy.predicts:
        log.warning("prefill times are unknown until the first prompt is timed: %s.", why)
