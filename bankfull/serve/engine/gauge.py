"""What the engine holds and has done so far, kept up step by step so that asking costs nothing."""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable
from typing import TYPE_CHECKING

from bankfull.errors import BankfullError
from bankfull.limits.meter.step import StepShape
from bankfull.llm import LLM
from bankfull.serve.engine.wire import Load
from bankfull.types import StepPlan

if TYPE_CHECKING:
    from bankfull.limits.meter.closed_form import ClosedForm

log = logging.getLogger("bankfull")


def known_ceilings(llm: LLM) -> tuple[ClosedForm, dict[str, float]] | None:
    """What a step of this model costs, and the ceilings of the device that it runs on; None if they were never measured
    here. Measuring takes seconds, an idle device and free memory: that is not for a server to begin with."""
    from bankfull.limits.meter.step_limit import step_limit_of

    try:
        step_limit = step_limit_of(llm, measure=False)
    except BankfullError as error:  # a model may well run without a meter
        log.warning("No limits are shown: %s", error)
        return None
    if step_limit is None:
        return None
    # A small model's weights may be read from the cache again and again.
    read = step_limit.ceilings.read_at(step_limit.form.cost(StepShape.decode()).read)
    ceilings = {"read_bytes_per_s": read}
    if step_limit.peak < math.inf:  # infinite if the model's arithmetic was not measured
        ceilings["flops"] = step_limit.peak
    return step_limit.form, ceilings


class Gauge:
    """`form`: what a step costs; without it nothing is said about bytes and arithmetic."""

    def __init__(self, llm: LLM, form: ClosedForm | None) -> None:
        self._engine = llm.loaded.frontend.engine
        self._form = form
        self._waiting: dict[Hashable, int] = {}
        self._waiting_tokens = 0
        self._queries = self._hits = 0
        self._bytes = self._flops = 0.0
        self._decode_busy = self._decode_bytes = self._decode_flops = 0.0
        self._busy = self._engine.totals.busy
        self._decodes = False
        self._engine.on_launch.append(self._note)

    def queued(self, request: Hashable, tokens: int) -> None:
        self._waiting[request] = tokens
        self._waiting_tokens += tokens

    def gone(self, request: Hashable) -> None:
        """It waits no more: it runs, or nobody wants it."""
        self._waiting_tokens -= self._waiting.pop(request, 0)

    def load(self) -> Load:
        """After each step."""
        engine, scheduler, pages = self._engine, self._engine.scheduler, self._engine.scheduler.state.pages
        if self._decodes:
            self._decode_busy += engine.totals.busy - self._busy
        self._busy = engine.totals.busy
        return Load(
            scheduler.running,
            scheduler.waiting,
            self._waiting_tokens,
            pages.size - pages.available,
            pages.size,
            self._queries,
            self._hits,
            scheduler.preemptions,
            engine.totals.steps,
            self._busy,
            self._bytes,
            self._flops,
            self._decode_busy,
            self._decode_bytes,
            self._decode_flops,
        )

    def _note(self, plan: StepPlan) -> None:
        for enter in plan.enter:
            self.gone(enter.request)
            if not enter.child and len(enter.tokens) == enter.prompt_len:
                self._queries += enter.prompt_len
                self._hits += enter.computed
        self._decodes = all(work.count == 1 for work in plan.work)
        if self._form is None or not plan.work:
            return
        cost = self._form.cost(StepShape.of(plan.work))
        self._bytes += cost.bytes
        self._flops += cost.flops
        if self._decodes:
            self._decode_bytes += cost.bytes
            self._decode_flops += cost.flops
