"""The shortest latencies of single requests on the server's machine.

The model's files give the shortest time to the first token, and per further token, on an otherwise idle machine.
Interference by other requests therefore counts as distance from the limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from bankfull.bench.load.client import Outcome
from bankfull.bench.load.utilization import NO_DRAFTS, Ceiling, GeneratedTokens
from bankfull.errors import BankfullError

if TYPE_CHECKING:
    from bankfull.bench.load.server import ServerUnderTest
    from bankfull.limits.meter.closed_form import ClosedForm


class RequestLimits:
    """Shortest latencies of a request on an otherwise idle machine."""

    def __init__(self, form: ClosedForm, ceiling: Ceiling) -> None:
        self._form, self._ceiling = form, ceiling

    def ttft(self, outcome: Outcome) -> float:
        from bankfull.limits.meter.step import StepShape

        past = min(outcome.cached_tokens or 0, max(0, outcome.input_tokens - 1))
        return self._seconds(StepShape.prefill(max(1, outcome.input_tokens - past), past=past))

    def step(self, outcome: Outcome, tokens: GeneratedTokens = NO_DRAFTS) -> float | None:
        """Time of a step in the middle of the output; costs grow linearly with the context. `tokens`: the server's, for
        the draft tokens of an average step."""
        from bankfull.limits.meter.step import StepShape

        if outcome.output_tokens < 2:
            return None
        drafts = round(tokens.drafts_per_step)
        length = max(1, outcome.input_tokens) + outcome.output_tokens // 2 + drafts
        return self._seconds(StepShape((1 + drafts,), (length,), 1 + drafts))

    def tpot(self, outcome: Outcome, tokens: GeneratedTokens = NO_DRAFTS) -> float | None:
        """Time per token: a step gives one, and with draft tokens as many as the server's average."""
        step = self.step(outcome, tokens)
        return None if step is None else step / tokens.tokens_per_step

    def mean(self, outcomes: Sequence[Outcome], tokens: GeneratedTokens = NO_DRAFTS) -> dict[str, float]:
        """Means by latency name over the completed requests."""
        good = [one for one in outcomes if one.error is None]
        limits = [(self.ttft(o), self.tpot(o, tokens), o.output_tokens) for o in good]
        if not limits:
            return {}
        means = {
            "ttft": fmean(first for first, _, _ in limits),
            "e2e": fmean(first + (each or 0.0) * (tokens - 1) for first, each, tokens in limits),
        }
        if known := [each for _, each, _ in limits if each is not None]:
            # ITL measures the gaps between the steps that gave tokens.
            gaps = [gap for one in good if (gap := self.step(one, tokens)) is not None]
            means |= {"tpot": fmean(known), "itl": fmean(gaps)}
        return means

    def _seconds(self, step: object) -> float:
        from bankfull.ops.cost import Rates

        cost = self._form.cost(step)  # type: ignore[arg-type]
        # A server reports one peak: that of its mix of operands.
        return cost.seconds(Rates.flat(self._ceiling.flop_per_s), self._ceiling.bytes_per_s)


def request_limits(server: ServerUnderTest, ceiling: Ceiling | None, files: Path | None) -> RequestLimits | None:
    """`files`: the model's files if given by the user; otherwise those that a local bankfull server reports, if they
    exist here. None if neither is known: a benchmark must not start a download."""
    if not server.address.local:
        return None
    path = files or (_here(str(server.entry.get("root", ""))) if server.ours else None)
    if path is None:
        return None
    try:
        return _of_files(path, ceiling)
    except BankfullError:
        if files is not None:
            raise
        return None  # the served name may not be a path


def _of_files(path: Path, ceiling: Ceiling | None) -> RequestLimits:
    from bankfull.limits.machine.ceilings import measure
    from bankfull.limits.meter.closed_form import closed_form
    from bankfull.limits.meter.metered import MeteredModel
    from bankfull.limits.meter.step import StepShape
    from bankfull.weights.locate import locate
    from bankfull.weights.source import open_model

    metered = MeteredModel(open_model(locate(str(path))))
    form = closed_form(metered)
    if ceiling is None:
        ceilings = measure()
        reads = ceilings.read_at(form.cost(StepShape.decode()).read)
        # The server does not report its dtype: the fastest type bounds all, provided every type was measured.
        ceiling = Ceiling(reads, math.inf if ceilings.unmeasured else max(ceilings.flops.values()))
    return RequestLimits(form, ceiling)


def _here(name: str) -> Path | None:
    from bankfull.weights import fetch

    if name in fetch.SHORT_NAMES:
        model = fetch.SHORT_NAMES[name]
        return fetch.installed(model) or fetch.cached(name, model)
    try:
        return Path(name) if name and Path(name).exists() else None
    except OSError:
        return None
