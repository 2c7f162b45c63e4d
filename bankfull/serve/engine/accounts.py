"""Accounts of requests whose clients want to know where the time went; nobody else's request is timed."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

from bankfull.errors import BankfullError
from bankfull.llm import LLM

if TYPE_CHECKING:
    from bankfull.frontend import Pending
    from bankfull.limits.explain.advice import Adviser
    from bankfull.limits.explain.recorder import RequestRecorder
    from bankfull.limits.meter.step_limit import StepLimit

log = logging.getLogger("bankfull")


class Accounts:
    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._lock = threading.Lock()
        self._known: tuple[RequestRecorder, Adviser | None] | None = None

    def prepare(self) -> None:
        """The model on the meter, once: not for the loop's thread, which others wait for."""
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
        except BankfullError as error:  # a model may well run without a meter
            log.warning("Accounts have no limits: %s", error)
        return RequestRecorder(self._llm.loaded.frontend.engine, step_limit), adviser

    # -- on the loop's thread

    def follow(self, request: int, pending: Pending) -> None:
        assert self._known is not None, "prepare comes first"
        self._known[0].follow(request, pending.arrived, len(pending.samples))

    def finish(self, request: int, pending: Pending) -> dict[str, Any] | None:
        """None for a request that nobody wants explained."""
        if self._known is None or not self._known[0].follows(request):
            return None
        from bankfull.limits.explain.explain import explain

        recorder, adviser = self._known
        story = recorder.finish(request, pending.arrived + (pending.result.metrics.finished or 0.0))
        return explain(story, recorder.step_limit, adviser).as_json()

    def forget(self, request: int) -> None:
        if self._known is not None:
            self._known[0].forget(request)
