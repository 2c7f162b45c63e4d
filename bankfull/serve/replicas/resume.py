"""A stream that survives its replica.

The stream keeps the tokens of each sample that it has passed on. When its replica ends, it submits the request to
another one together with these tokens, and goes on with the first new one: random numbers are keyed by position, so the
tokens are those that the first replica would have generated. A request with `pool` or without output is begun anew. A
request with `explain` of which tokens were passed on is not resumed, because no engine has an account of all its time.

A request that ends its engines is given up, and no other one is. Engines report which requests they begin to work on
(`wire.Begun`). A request that an engine worked on when it ended, without a token from it, is a suspect: it runs on a
replica without another suspect until it has a token. If MOST_BARREN engines in a row end in that state, this request is
the reason. Engines that end while a request waits in their queue are not counted against it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from bankfull.errors import BankfullError
from bankfull.fleet.meter import ReplicaMeter
from bankfull.outputs import Delta
from bankfull.serve.engine.backend import STOPPED, Busy, DeadlineExceeded, EngineDied, EngineFault, Unavailable
from bankfull.serve.engine.wire import RequestDone
from bankfull.submit import Submit

log = logging.getLogger("bankfull.serve")

MOST_BARREN = 4
"""Engines that may end while they work on a request, without a new token in between, before it is given up."""
MOST_DEATHS = 64
"""Engines that may end under one request, however that happens: the bound for a request that ends them in a way that no
report shows."""
TURN_SECONDS = 0.02
"""Time between two looks for a replica without another suspect."""
RETRY_SECONDS = 0.25
"""Time before a resumed request is submitted again that an engine had no room to prepare."""

EXPLAINED = "The engine has ended, and a request with explain cannot continue on another one; ask again."
LATE = "The request's deadline has passed before its answer was complete."


class EngineStream(Protocol):
    """The deltas of a request from one engine: `link.Stream`, or a test's own."""

    worked_on: bool
    """Whether the engine has reported that it works on the request."""
    on_run: Callable[[], None] | None
    """Called when the engine begins to compute the prompt, or to compute it again."""

    def __aiter__(self) -> AsyncIterator[list[Delta | RequestDone]]: ...

    async def __anext__(self) -> list[Delta | RequestDone]: ...

    async def aclose(self) -> None: ...


class Leg:
    """The part of a stream that runs on one replica, and its place in the replica's meter."""

    __slots__ = ("_answered", "_loop", "_meter", "_number", "replica", "steps", "weights")

    def __init__(self, replica: str, steps: EngineStream, meter: ReplicaMeter, number: int, weights: str = "") -> None:
        self.replica, self.steps, self.weights = replica, steps, weights
        self._meter = meter
        self._number: int | None = number
        self._answered = False
        self._loop = asyncio.get_running_loop()

    @property
    def barren(self) -> bool:
        """Whether the engine has worked on the request without a token so far."""
        return self.steps.worked_on and not self._answered

    def answered(self) -> None:
        if not self._answered and self._number is not None:
            self._answered = True
            self._meter.answered(self._number)

    def detach(self) -> tuple[ReplicaMeter, int]:
        """Detach the leg's place in the meter, for another leg that takes it over."""
        number, self._number = self._number, None
        assert number is not None, "an ended leg has no place"
        return self._meter, number

    def end(self) -> None:
        if self._number is not None:
            self._meter.ended(self._number)
            self._number = None

    def hand_over(self) -> HandOver:
        """The replica has computed the prompt, and leaves the rest to another one."""
        raise AssertionError("a replica hands over only what it was asked to")

    async def leave(self) -> None:
        """The rest is not wanted."""
        self.end()
        await self.steps.aclose()

    def __del__(self) -> None:
        if self._number is not None:
            # Garbage is collected on any thread, and after the end of the event loop too.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._meter.ended, self._number)


class HandOver(Protocol):
    """A request between the replica that has computed its prompt and the one that decodes."""

    async def wait(self, most: float) -> None:
        """Wait until its state has arrived, or for at most so many seconds."""
        ...

    def go(self, submit: Submit) -> Leg:
        """Submit what is left of it to the replica that decodes, or to another one. Raises as `Dispatcher.dispatch`."""
        ...

    def close(self) -> None:
        """It is not wanted any longer."""
        ...

    def account(self) -> dict[str, Any]:
        """What was handed over, for a request with `explain`."""
        ...

    weights: str


class Dispatcher(Protocol):
    """The replicas as a stream sees them."""

    patience: float
    """Seconds that a stream waits while there is no replica that could continue it."""

    @property
    def ready(self) -> bool:
        """Whether there is a replica that takes requests."""
        ...

    def dispatch(self, submit: Submit, *, suspect: bool = False, weights: str = "") -> Leg:
        """Submit a request to a replica, a suspect to one without another suspect. `weights`: the fingerprint that its
        replica must have, if it has tokens already. Raises Busy or Unavailable, or EngineDied if no replica has these
        weights any more."""
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
        "_deaths",
        "_ended",
        "_finished",
        "_first",
        "_handed",
        "_leg",
        "_onward",
        "_refused",
        "_replicas",
        "_resumes",
        "_submit",
        "_tokens",
        "_transfer",
    )

    def __init__(self, replicas: Dispatcher, submit: Submit) -> None:
        """Submits the request. Raises Busy or Unavailable."""
        self._replicas, self._submit = replicas, submit
        self._begun = time.monotonic()
        self._first: float | None = None
        """Time of the first token."""
        self._tokens: list[list[int]] = [[] for _ in range(submit.params.n if submit.generates else 1)]
        """Tokens that were passed on, by sample."""
        self._finished: list[int] = []
        self._resumes = self._deaths = self._barren = 0
        self._refused: float | None = None
        """Since when engines have no room to prepare it."""
        self._ended = False
        self._onward: HandOver | None = None
        self._handed: RequestDone | None = None
        """The account of the replica that has computed the prompt."""
        self._transfer: dict[str, Any] | None = None
        self._leg: Leg | None = replicas.dispatch(submit)

    def __aiter__(self) -> ResumableStream:
        return self

    async def __anext__(self) -> list[Delta | RequestDone]:
        while (leg := self._leg if self._onward is None else await self._handed_on(self._onward)) is not None:
            try:
                items = await leg.steps.__anext__()
            except (EngineDied, Unavailable, Busy) as error:
                leg.end()
                self._leg = None
                last = await self._go_on(leg, error)
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
        self._close_onward()
        leg, self._leg = self._leg, None
        if leg is not None:
            await leg.leave()

    def _note(self, leg: Leg, items: list[Delta | RequestDone]) -> None:
        """Keep what is passed on. This runs for every token of every stream."""
        for item in items:
            if isinstance(item, Delta):
                if item.token_ids:
                    self._tokens[item.index] += item.token_ids
                    self._barren, self._refused = 0, None
                    if self._first is None:
                        self._first = time.monotonic()
                    leg.answered()
                if item.finish_reason is not None:
                    self._finished.append(item.index)
            elif item.handed:
                self._handed, self._onward, self._leg = item, leg.hand_over(), None
                leg.end()
                items.pop()  # always the last item
            else:
                leg.end()
                if self._resumes or self._handed is not None:
                    self._whole(item)

    def _unfinished(self, items: list[Delta | RequestDone]) -> list[Delta | RequestDone]:
        """The items without those of samples whose end was passed on: a request without output is begun anew, and ends
        again."""
        return [item for item in items if not isinstance(item, Delta) or item.index not in self._finished]

    def _whole(self, done: RequestDone) -> None:
        """The account of a resumed request covers all its replicas."""
        done.output_tokens = sum(map(len, self._tokens))
        done.seconds = time.monotonic() - self._begun
        if self._first is not None:
            done.ttft = self._first - self._begun
        if (before := self._handed) is not None:  # what the next replica found was computed there
            done.queue, done.cached_tokens, done.kept = before.queue, before.cached_tokens, before.kept
            if done.account is not None:
                done.account = {**done.account, "prefill": before.account, "handed_over": self._transfer}

    def _end(self) -> None:
        self._ended = True
        self._close_onward()
        leg, self._leg = self._leg, None
        if leg is not None:
            leg.end()

    # -- from the replica that computes the prompt to the one that decodes

    async def _handed_on(self, onward: HandOver) -> Leg | None:
        """The leg on which a request that was handed over goes on."""
        try:
            await self._go_onward(onward)
        except BaseException:
            self._end()
            raise
        self._close_onward()
        return self._leg

    async def _go_onward(self, onward: HandOver) -> None:
        left = self._submit.seconds_left()
        await onward.wait(math.inf if left is None else left)
        if self._submit.explain:
            self._transfer = onward.account()
        left = self._submit.seconds_left()
        if left is not None and left <= 0:
            raise DeadlineExceeded(LATE)
        try:
            self._leg = onward.go(self._rest())
        except (Busy, Unavailable) as error:
            self._resumes += 1
            await self._submit_again(onward.weights, error)

    def _rest(self) -> Submit:
        """The request with what was passed on of its answer, which another engine continues."""
        return replace(self._submit, generated=self._tokens, finished=self._finished, admitted=True)

    def _close_onward(self) -> None:
        onward, self._onward = self._onward, None
        if onward is not None:
            onward.close()

    # -- after the end of a replica

    async def _go_on(self, left: Leg, error: BankfullError) -> list[Delta | RequestDone] | None:
        """Submit the request to another replica, or raise why that is impossible. Returns the last items of a request
        that misses nothing but its end."""
        try:
            self._check(left, error)
            if self._submit.generates and len(self._finished) == len(self._tokens):
                return self._closing_items(error)
            await self._submit_again(left.weights, error)
        except BaseException:
            self._end()
            raise
        if self._leg is not None:
            self._replicas.resumed(left.replica)
            log.debug("A request of replica %s continues on replica %s.", left.replica, self._leg.replica)
        return None

    def _check(self, left: Leg, error: BankfullError) -> None:
        """Raises the error if the request cannot be resumed."""
        if self._replicas.closing or isinstance(error, EngineFault):
            raise error
        if isinstance(error, Busy) and not self._resumes:
            raise error  # nothing has begun, and the client may retry
        if self._submit.explain and any(self._tokens):
            raise EngineDied(EXPLAINED) from error
        self._resumes += 1
        if isinstance(error, EngineDied):
            self._deaths += 1
            self._barren += left.barren
        if self._barren >= MOST_BARREN or self._deaths >= MOST_DEATHS:
            count = self._barren if self._barren >= MOST_BARREN else self._deaths
            raise EngineDied(
                f"{count} engines have ended while they ran this request; it is not tried again."
            ) from error

    def _closing_items(self, error: BankfullError) -> list[Delta | RequestDone]:
        """All samples have ended, and only `RequestDone` was lost with the replica."""
        if self._submit.explain or self._submit.params.prompt_logprobs is not None:
            raise EngineDied(
                "The engine has ended before it sent the prompt's log-probabilities; ask again."
            ) from error
        return [RequestDone(0, None, None, 0.0, 0, 0)]

    async def _submit_again(self, weights: str, error: BankfullError) -> None:
        """`weights`: the fingerprint that those have with which its tokens were generated."""
        some = self._submit.generates and (any(self._tokens) or bool(self._finished))
        submit = self._rest() if some else replace(self._submit, admitted=True)
        weights = weights if some else ""
        suspect = self._barren > 0
        if isinstance(error, Busy):
            await self._wait_for_room(error)
        ends = time.monotonic() + self._replicas.patience
        while not self._ended:
            now = time.monotonic()
            left = submit.seconds_left()
            if left is not None and left <= 0:
                raise DeadlineExceeded(LATE) from error
            try:
                self._leg = self._replicas.dispatch(submit, suspect=suspect, weights=weights)
                return
            except (Busy, Unavailable) as refusal:
                if self._replicas.closing:
                    raise Unavailable(STOPPED) from refusal
                waits = suspect and self._replicas.ready  # for another suspect, not for a replica
                if waits:
                    ends = now + self._replicas.patience
                elif now >= ends:
                    raise EngineDied(
                        f"The engine has ended while the request was running, and no other one was ready within "
                        f"{self._replicas.patience:g} seconds; ask again."
                    ) from refusal
            pause = TURN_SECONDS if waits else ends - now
            await self._replicas.wait_change(min(pause, left if left is not None else pause))

    async def _wait_for_room(self, error: Busy) -> None:
        """An engine had no room to prepare the request. Raises EngineDied if that has lasted too long."""
        now = time.monotonic()
        if self._refused is None:
            self._refused = now
        elif now >= self._refused + self._replicas.patience:
            raise EngineDied(
                f"The engine has ended while the request was running, and the others had no room to prepare it within "
                f"{self._replicas.patience:g} seconds; ask again."
            ) from error
        await asyncio.sleep(RETRY_SECONDS)
