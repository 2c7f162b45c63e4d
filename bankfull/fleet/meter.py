"""What the front knows about one replica's work: requests sent to it, the prompt tokens it still has to compute, and
its measured rates. `candidate` is the view that routing policies see."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from bankfull.fleet.reports import Facts, Load
from bankfull.fleet.routing import Candidate, fullness_of, online_of

NEWEST_SHARE = 0.1
"""Weight of the newest request in the average time that requests hold a row."""


@dataclass(slots=True)
class SentRequest:
    prompt_tokens: int
    uncached_tokens: int
    samples: int
    batch: bool
    suspect: bool
    answered: float | None = None
    """Time of the first token, in seconds."""


class ReplicaMeter:
    """The order of calls for a request: `sent`, `answered` with its first token, `ended` however it ends."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._requests: dict[Hashable, SentRequest] = {}
        self._rows = self._step_tokens = 0
        self._prompt_tokens = self._uncached_tokens = 0
        """Tokens of all prompts without a first token, and of these the ones that were not cached; online only."""
        self._samples = self._batch_samples = 0
        self._row_ms = 0.0
        self._load: Load | None = None
        self.on_change: Callable[[], None] | None = None
        """Called when `candidate` may have changed."""
        self.suspects = 0
        """Requests without a first token that may have ended another engine."""

    @property
    def requests(self) -> int:
        """Requests that were sent and have not ended."""
        return len(self._requests)

    @property
    def batch_samples(self) -> int:
        """Batch sequences of these requests."""
        return self._batch_samples

    def started(self, facts: Facts) -> None:
        """The replica's engine is ready."""
        self._rows, self._step_tokens = facts.rows, facts.step_tokens
        self._changed()

    @property
    def load(self) -> Load | None:
        return self._load

    def report(self, load: Load | None) -> None:
        """The engine's newest load; None if it has none."""
        self._load = load
        self._changed()

    def lost(self) -> None:
        """The replica's engine has ended: nothing that it reported holds any more. Requests still have to end."""
        self.report(None)

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change()

    def sent(
        self,
        request: Hashable,
        prompt_tokens: int,
        cached_tokens: int = 0,
        samples: int = 1,
        batch: bool = False,
        suspect: bool = False,
    ) -> None:
        """A request was sent; `cached_tokens` as they were predicted."""
        one = SentRequest(prompt_tokens, max(1, prompt_tokens - cached_tokens), samples, batch, suspect)
        self._requests[request] = one
        self.suspects += suspect
        if batch:
            self._batch_samples += samples
        else:
            self._samples += samples
            self._prompt_tokens += one.prompt_tokens
            self._uncached_tokens += one.uncached_tokens
        self._changed()

    def answered(self, request: Hashable) -> None:
        """The request's first token has arrived. Later calls for the same request have no effect."""
        one = self._requests.get(request)
        if one is not None and one.answered is None:
            self._answered(one)

    def ended(self, request: Hashable) -> None:
        """The request has ended, whether it was answered or not. Has no effect for an unknown request."""
        one = self._requests.pop(request, None)
        if one is None:
            return
        if one.answered is None:
            self._answered(one)
        else:
            held = 1e3 * (self._clock() - one.answered)
            self._row_ms += (NEWEST_SHARE if self._row_ms else 1.0) * (held - self._row_ms)
        if one.batch:
            self._batch_samples -= one.samples
        else:
            self._samples -= one.samples
        self._changed()

    def _answered(self, one: SentRequest) -> None:
        one.answered = self._clock()
        self.suspects -= one.suspect
        if not one.batch:
            self._prompt_tokens -= one.prompt_tokens
            self._uncached_tokens -= one.uncached_tokens
        self._changed()

    def candidate(self, cached_tokens: int = 0) -> Candidate:
        """The replica for a request of whose prompt it holds `cached_tokens`."""
        load = self._load
        return Candidate(
            load=load,
            cached_tokens=cached_tokens,
            prefill_ms_per_token=load.prefill_ms_per_token if load is not None else 0.0,
            step_ms=load.step_ms if load is not None else 0.0,
            inflight_tokens=self._uncached_tokens + self._foreign_tokens(),
            rows=self._rows,
            inflight=self._samples,
            batch_inflight=self._batch_samples,
            step_tokens=self._step_tokens,
            row_ms=self._row_ms,
        )

    def figures(self) -> tuple[float, ...]:
        """The figures `NAMES` of `candidate`, for a table that reads them after every change."""
        load = self._load
        return (
            load.running if load is not None else 0,
            fullness_of(load),
            online_of(load, self._samples, self._batch_samples),
            self._batch_samples,
            self._uncached_tokens + self._foreign_tokens(),
            load.prefill_ms_per_token if load is not None else 0.0,
            load.step_ms if load is not None else 0.0,
            self._row_ms,
            self._rows,
            self._step_tokens,
        )

    def _foreign_tokens(self) -> int:
        """Prompt tokens that wait there and are not this front's own: another front has sent them, and its cache hits
        are unknown. Batch prompts wait in the same queue, and online requests overtake them."""
        if self._load is None or self._batch_samples:
            return 0
        return max(0, self._load.waiting_tokens - self._prompt_tokens)
