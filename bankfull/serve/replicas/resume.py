"""A stream that survives its replica.

The stream keeps the tokens of each sample that it has passed on. When its replica ends, it submits the request to
another one together with these tokens, and goes on with the first new one: random numbers are keyed by position, so the
tokens are those that the first replica would have generated. A request with `pool` or without output is begun anew. A
request with `explain` of which tokens were passed on is not resumed, because no engine has an account of all its time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from bankfull.errors import BankfullError
from bankfull.fleet.meter import ReplicaMeter
from bankfull.outputs import Delta
from bankfull.sample.params import SamplingParams
from bankfull.serve.engine.backend import (
    STOPPED,
    Busy,
    Continuation,
    DeadlineExceeded,
    EngineDied,
    EngineFault,
    Unavailable,
)
from bankfull.serve.engine.wire import RequestDone

log = logging.getLogger("bankfull.serve")

Steps = AsyncIterator[list[Delta | RequestDone]]

MOST_RESUMES = 16
"""Replicas that may end under one request before it is given up."""
MOST_BARREN = 3
"""The same without a new token in between: such a request may be what ends them."""

EXPLAINED = "The engine has ended, and a request with explain cannot continue on another one; ask again."
LATE = "The request's deadline has passed before its answer was complete."


@dataclass(frozen=True, slots=True)
class SentParts:
    """All parts of a request that are needed to submit it again."""

    prompt: list[int]
    params: SamplingParams
    priority: int
    salt: str
    pool: str | None
    explain: bool
    tenant: str

    @property
    def generates(self) -> bool:
        return self.pool is None and self.params.max_tokens != 0


class Leg:
    """The part of a stream that runs on one replica, and its place in the replica's meter."""

    __slots__ = ("_answered", "_loop", "_meter", "_number", "replica", "steps")

    def __init__(self, replica: str, steps: Steps, meter: ReplicaMeter, number: int) -> None:
        self.replica, self.steps = replica, steps
        self._meter = meter
        self._number: int | None = number
        self._answered = False
        self._loop = asyncio.get_running_loop()

    def answered(self) -> None:
        if not self._answered and self._number is not None:
            self._answered = True
            self._meter.answered(self._number)

    def end(self) -> None:
        if self._number is not None:
            self._meter.ended(self._number)
            self._number = None

    async def leave(self) -> None:
        """The rest is not wanted."""
        self.end()
        close = getattr(self.steps, "aclose", None)
        if close is not None:
            await close()

    def __del__(self) -> None:
        if self._number is not None:
            # Garbage is collected on any thread, and after the end of the event loop too.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._meter.ended, self._number)


class Dispatcher(Protocol):
    """The replicas as a stream sees them."""

    patience: float
    """Seconds that a stream waits for a replica that can continue it."""

    def dispatch(self, parts: SentParts, deadline: float | None, begun: Continuation | None = None) -> Leg:
        """Submit a request to a replica. `deadline`: seconds from now. Raises Busy or Unavailable."""
        ...

    async def wait_change(self, seconds: float) -> None:
        """Returns when a replica has changed its state, or after so many seconds."""
        ...

    def resumed(self, replica: str) -> None:
        """A request that ran on this replica continues on another one."""
        ...

    @property
    def closing(self) -> bool:
        """Whether all replicas are being ended."""
        ...


class ResumableStream:
    """The deltas of one request, step by step, until `RequestDone`, whatever replicas it runs on. Leaving it, by
    `aclose`, by cancelling the wait or by dropping the last reference, aborts the request."""

    __slots__ = (
        "_barren",
        "_begun",
        "_deadline",
        "_ended",
        "_finished",
        "_first",
        "_leg",
        "_parts",
        "_replicas",
        "_resumes",
        "_tokens",
    )

    def __init__(self, replicas: Dispatcher, parts: SentParts, deadline: float | None) -> None:
        """Submits the request. Raises Busy or Unavailable."""
        self._replicas, self._parts = replicas, parts
        self._begun = time.monotonic()
        self._deadline = None if deadline is None else self._begun + deadline
        self._first: float | None = None
        """Time of the first token."""
        self._tokens: list[list[int]] = [[] for _ in range(parts.params.n if parts.generates else 1)]
        """Tokens that were passed on, by sample."""
        self._finished: list[int] = []
        self._resumes = self._barren = 0
        self._ended = False
        self._leg: Leg | None = replicas.dispatch(parts, deadline)

    def __aiter__(self) -> ResumableStream:
        return self

    async def __anext__(self) -> list[Delta | RequestDone]:
        while (leg := self._leg) is not None:
            try:
                items = await leg.steps.__anext__()
            except (EngineDied, Unavailable, Busy) as error:
                leg.end()
                self._leg = None
                last = await self._go_on(leg.replica, error)
                if last is None:
                    continue
                items = last
            except BaseException:
                self._end()
                raise
            if self._resumes:
                items = self._unfinished(items)
            self._note(leg, items)
            if items:
                return items
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self._ended = True
        leg, self._leg = self._leg, None
        if leg is not None:
            await leg.leave()

    def _note(self, leg: Leg, items: list[Delta | RequestDone]) -> None:
        """Keep what is passed on. This runs for every token of every stream."""
        for item in items:
            if isinstance(item, Delta):
                if item.token_ids:
                    self._tokens[item.index] += item.token_ids
                    self._barren = 0
                    if self._first is None:
                        self._first = time.monotonic()
                    leg.answered()
                if item.finish_reason is not None:
                    self._finished.append(item.index)
            else:  # always the last item
                leg.end()
                if self._resumes:
                    self._whole(item)

    def _unfinished(self, items: list[Delta | RequestDone]) -> list[Delta | RequestDone]:
        """Without samples whose end was passed on: a request without output is begun anew, and ends again."""
        return [item for item in items if not isinstance(item, Delta) or item.index not in self._finished]

    def _whole(self, done: RequestDone) -> None:
        """The account of a resumed request covers all its replicas."""
        done.output_tokens = sum(map(len, self._tokens))
        done.seconds = time.monotonic() - self._begun
        if self._first is not None:
            done.ttft = self._first - self._begun

    def _end(self) -> None:
        self._ended = True
        leg, self._leg = self._leg, None
        if leg is not None:
            leg.end()

    # -- after the end of a replica

    async def _go_on(self, replica: str, error: BankfullError) -> list[Delta | RequestDone] | None:
        """Submit the request to another replica, or raise why that is impossible. Returns the last items of a request
        that misses nothing but its end."""
        try:
            self._check(error)
            if self._parts.generates and len(self._finished) == len(self._tokens):
                return self._closing_items(error)
            await self._submit_again(error)
        except BaseException:
            self._end()
            raise
        if self._leg is not None:
            self._replicas.resumed(replica)
            log.debug("A request of replica %s continues on replica %s.", replica, self._leg.replica)
        return None

    def _check(self, error: BankfullError) -> None:
        """Raises the error if the request cannot be resumed."""
        if self._replicas.closing or isinstance(error, EngineFault):
            raise error
        if isinstance(error, Busy) and not self._resumes:
            raise error  # nothing has begun, and the client may retry
        if self._parts.explain and any(self._tokens):
            raise EngineDied(EXPLAINED) from error
        self._resumes += 1
        self._barren += 1
        if self._resumes > MOST_RESUMES or self._barren > MOST_BARREN:
            raise EngineDied(
                f"{self._resumes} engines have ended while they ran this request; it is not tried again."
            ) from error

    def _closing_items(self, error: BankfullError) -> list[Delta | RequestDone]:
        """All samples have ended, and only `RequestDone` was lost with the replica."""
        if self._parts.explain or self._parts.params.prompt_logprobs is not None:
            raise EngineDied(
                "The engine has ended before it sent the prompt's log-probabilities; ask again."
            ) from error
        return [RequestDone(0, None, None, 0.0, 0, 0)]

    async def _submit_again(self, error: BankfullError) -> None:
        some = self._parts.generates and (any(self._tokens) or bool(self._finished))
        begun = Continuation(self._tokens, self._finished) if some else Continuation([], [])
        ends = time.monotonic() + self._replicas.patience
        while not self._ended:
            now = time.monotonic()
            left = None if self._deadline is None else self._deadline - now
            if left is not None and left <= 0:
                raise DeadlineExceeded(LATE) from error
            try:
                self._leg = self._replicas.dispatch(self._parts, left, begun)
                return
            except (Busy, Unavailable) as refusal:
                if self._replicas.closing:
                    raise Unavailable(STOPPED) from refusal
                if now >= ends:
                    raise EngineDied(
                        f"The engine has ended while the request was running, and no other one was ready within "
                        f"{self._replicas.patience:g} seconds; ask again."
                    ) from refusal
            await self._replicas.wait_change(min(ends - now, left if left is not None else ends - now))
