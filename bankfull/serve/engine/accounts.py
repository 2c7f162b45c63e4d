"""The limits of this machine, and the accounts of requests against them: where their time went, for clients that ask
for it. No other request is timed."""

from __future__ import annotations

import logging
import math
import threading
from typing import TYPE_CHECKING, Any

from bankfull.errors import BankfullError
from bankfull.llm import LLM

if TYPE_CHECKING:
    from bankfull.frontend import Pending
    from bankfull.limits.explain.advice import Adviser
    from bankfull.limits.explain.recorder import RequestRecorder
    from bankfull.limits.meter.closed_form import ClosedForm
    from bankfull.limits.meter.step_limit import StepLimit

log = logging.getLogger("bankfull")


def known_ceilings(llm: LLM) -> tuple[ClosedForm, dict[str, float]] | None:
    """The cost model of a step, and the ceilings of the device; None if they were never measured on this machine. The
    server does not measure them itself: that takes seconds, an idle device and free memory."""
    from bankfull.limits.meter.step import StepShape
    from bankfull.limits.meter.step_limit import step_limit_of

    try:
        step_limit = step_limit_of(llm, measure=False)
    except BankfullError as error:  # a model may run without a meter
        log.warning("No limits are shown: %s", error)
        return None
    if step_limit is None:
        return None
    # A small model's weights may be read from the cache again and again.
    read = step_limit.ceilings.read_at(step_limit.form.cost(StepShape.decode()).read)
    ceilings = {"read_bytes_per_s": read}
    if step_limit.peak < math.inf:  # else the model's arithmetic was never measured here
        ceilings["flops"] = step_limit.peak
    return step_limit.form, ceilings


class Explainer:
    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._lock = threading.Lock()
        self._known: tuple[RequestRecorder, Adviser | None] | None = None

    def prepare(self) -> None:
        """Run the model on the meter, once. Not on the loop's thread: it takes too long."""
        with self._lock:
            if self._known is None:
                self._known = self._make()

    def _make(self) -> tuple[RequestRecorder, Adviser | None]:
        from bankfull.limits.explain.advice import adviser_of
        from bankfull.limits.explain.recorder import RequestRecorder
        from bankfull.limits.meter.step_limit import step_limit_of

        step_limit: StepLimit | None = None
        adviser: Adviser | None = None
        try:
            step_limit = step_limit_of(self._llm, measure=False)
            adviser = None if step_limit is None else adviser_of(self._llm, step_limit)
        except BankfullError as error:  # a model may run without a meter
            log.warning("Accounts have no limits: %s", error)
        return RequestRecorder(self._llm.loaded.frontend.engine, step_limit), adviser

    # -- on the loop's thread

    def follow(self, request: int, pending: Pending) -> None:
        assert self._known is not None, "prepare comes first"
        scheduled = pending.request
        self._known[0].follow(
            request, pending.arrived, len(pending.samples) - len(scheduled.finished), scheduled.drafts
        )

    def finish(self, request: int, pending: Pending) -> dict[str, Any]:
        from bankfull.limits.explain.explain import explain

        assert self._known is not None, "follow comes first"
        recorder, adviser = self._known
        metrics = pending.result.metrics
        story = recorder.finish(request, pending.arrived + (metrics.finished or 0.0), metrics.blocked)
        return explain(story, recorder.step_limit, adviser).as_json()

    def forget(self, request: int) -> None:
        if self._known is not None:
            self._known[0].forget(request)
