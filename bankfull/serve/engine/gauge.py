"""The engine's load after each step, for metrics, admission and routing."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from bankfull.fleet.reports import Load, optional_parts, queue_figures, routing_figures, tier_figures

if TYPE_CHECKING:
    from bankfull.engine import Engine
    from bankfull.limits.meter.closed_form import ClosedForm
    from bankfull.types import StepPlan


class Gauge:
    """Counters of the engine's load and work, updated step by step so that reading them costs nothing. `form`: the cost
    model of a step; without it bytes and arithmetic are not counted. `paced`: the load has the pace of the last steps
    and the cached pages, for routing."""

    def __init__(self, engine: Engine[Any], form: ClosedForm | None, paced: bool = False) -> None:
        self._engine = engine
        self._form = form
        self._waiting: dict[Hashable, int] = {}
        self._waiting_tokens = 0
        self._queries = self._hits = 0
        self._bytes = self._flops = 0.0
        self._decode_busy = self._decode_bytes = self._decode_flops = 0.0
        self._busy = self._engine.totals.busy
        self._decodes = False
        self._engine.on_launch.append(self._note)
        self._paced = paced
        if paced:
            self._engine.scheduler.pace.measured = True

    def queued(self, request: Hashable, tokens: int) -> None:
        self._waiting[request] = tokens
        self._waiting_tokens += tokens

    def gone(self, request: Hashable) -> None:
        """A request has left the queue: it runs, or was aborted."""
        self._waiting_tokens -= self._waiting.pop(request, 0)

    def load(self) -> Load:
        """The load after a step."""
        engine, scheduler = self._engine, self._engine.scheduler
        pages, pins = scheduler.state.pages, scheduler.state.pins
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
            *(routing_figures(engine.scheduler) if self._paced else (0.0, 0.0, 0)),
            list(engine.totals.drafted),
            list(engine.totals.accepted),
            engine.totals.sampled,
            *(tier_figures(scheduler) if scheduler.state.tiers is not None else ([], None)),
            len(pins.all),
            pins.places if pins.all else 0,
            pins.counts.given_up,
            pins.counts.over_quota,
            *(queue_figures(scheduler) if self._paced else ([], 0.0)),
            optional_parts(scheduler),
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
        from bankfull.limits.meter.step import StepShape

        cost = self._form.cost(StepShape.of(plan.work))
        self._bytes += cost.bytes
        self._flops += cost.flops
        if self._decodes:
            self._decode_bytes += cost.bytes
            self._decode_flops += cost.flops
