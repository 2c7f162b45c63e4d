"""The API's link to the engine process: submits requests, and distributes the deltas of each step to their streams."""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any

from bankfull.errors import BankfullError, RequestError
from bankfull.outputs import Delta
from bankfull.serve.engine.admission import QueueLimits, Ticket
from bankfull.serve.engine.backend import STOPPED, Busy, DeadlineExceeded, EngineFault, Unavailable
from bankfull.serve.engine.keeper import SHUTTING_DOWN, STALL_SECONDS, EngineKeeper
from bankfull.serve.engine.process import EngineFactory, EngineProcess
from bankfull.serve.engine.wire import (
    Abort,
    Arrived,
    Begun,
    Configure,
    Enqueue,
    ExchangeEnds,
    Expect,
    Facts,
    Failed,
    Forgotten,
    FromEngine,
    Load,
    LoadingPhase,
    PagesShown,
    PageTables,
    PrefixChanges,
    Ready,
    Refused,
    RequestDone,
    ResetCache,
    RoomGranted,
    Ship,
    Shipped,
    ShowPages,
    StepMessage,
    ToEngine,
    pack,
    postponed,
    preparation,
)
from bankfull.submit import Submit

log = logging.getLogger("bankfull.serve")

Options = Mapping[str, str | int | float | bool | None]
OnRoom = Callable[[RoomGranted | None], None]
"""Called with every answer to an `Expect`, and with None when the engine has ended."""
OnShipped = Callable[[Shipped | None], None]
"""The same for a `Ship`."""


class Stream:
    """The deltas of one request, step by step, until `RequestDone`. Leaving it, by `aclose`, by cancelling the wait or
    by dropping the last reference, aborts the request: the link itself holds only a weak reference."""

    __slots__ = (
        "__weakref__",
        "_error",
        "_link",
        "_loop",
        "_ticket",
        "_timer",
        "_waiter",
        "ended",
        "id",
        "items",
        "on_run",
        "prepared",
        "worked_on",
    )

    def __init__(self, link: Link, request: int, ticket: Ticket, prepared: bool) -> None:
        self.id = request
        self.prepared = prepared
        """The engine can run it at once: there is no grammar to compile first."""
        self.worked_on = False
        """The engine has reported that it works on the request: it may be what ends the engine."""
        self.on_run: Callable[[], None] | None = None
        """Called whenever the request gets a row."""
        self.items: list[Delta | RequestDone] = []
        self.ended = False
        self._link, self._ticket = link, ticket
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._error: BankfullError | None = None

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> list[Delta | RequestDone]:
        while not self.items:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self.ended:
                raise StopAsyncIteration
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                self.leave()
                raise
            finally:
                self._waiter = None
        items, self.items = self.items, []
        return items

    async def aclose(self) -> None:
        self.leave()

    def __del__(self) -> None:
        if not self.ended:
            # Garbage is collected on any thread, and after the end of the event loop too.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._link.abandon, self.id, self._ticket, self._timer)

    @property
    def batch(self) -> bool:
        return not self._ticket.counted

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def end(self) -> None:
        """Nothing more will come."""
        self.ended = True
        self._link.forget(self.id, self._ticket, self._timer)

    def leave(self) -> None:
        """The client does not want the rest."""
        if not self.ended:
            self.ended = True
            self._link.abandon(self.id, self._ticket, self._timer)

    def fail(self, error: BankfullError) -> None:
        """Raise the error after the items that have arrived already."""
        if not self.ended:
            self._error = error
            self.end()
            self.wake()

    def set_deadline(self, seconds: float) -> None:
        self._timer = self._loop.call_later(seconds, self._link.expire, self.id)


class Link(EngineKeeper):
    """A `Backend`: the requests of one engine."""

    def __init__(
        self,
        model: str,
        options: Options | None = None,
        limits: QueueLimits | None = None,
        threads: int | None = None,
        *,
        stall_seconds: float = STALL_SECONDS,
        give_up_after: float = 0.0,
        open_engine: EngineFactory = EngineProcess,
        tells_prefixes: bool = False,
        tells_weights: bool = False,
        exchange: ExchangeEnds | None = None,
    ) -> None:
        """`stall_seconds`: time without progress after which an engine with work is restarted; 0: never.
        `give_up_after`: time without an engine after which a model that was loaded before is a `failure`; 0: never.
        `open_engine` makes each engine that is started: by default a process on this machine. `tells_prefixes`: the
        engine reports the keys of its prefix cache to `on_prefixes`, for routing. `exchange`: files that the engine
        inherits from `open_engine`, to hand over state or to get it."""
        configure = Configure(model, dict(options or {}), threads, tells_prefixes, tells_weights, exchange)
        super().__init__(configure, limits or QueueLimits(), open_engine, stall_seconds, give_up_after)
        self._streams: dict[int, weakref.ref[Stream]] = {}
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._rooms: dict[int, OnRoom] = {}
        self._shipments: dict[int, OnShipped] = {}
        self._numbers = count(1)
        self.on_prefixes: Callable[[PrefixChanges], None] | None = None

    # -- the backend

    @property
    def ready(self) -> bool:
        return self._ready and not self._draining

    @property
    def facts(self) -> Facts | None:
        return self._facts

    @property
    def load(self) -> Load | None:
        return self._load

    @property
    def optional(self) -> Mapping[str, str]:
        known = self._load if self._load is not None else self._facts
        return {} if known is None else known.optional

    @property
    def says(self) -> str:
        return self.admission.says

    @property
    def engine_pid(self) -> int | None:
        return None if self._engine is None else self._engine.pid

    def expect(self, samples: int, priority: int = 0, tenant: str = "") -> None:
        self.admission.expect(samples, 0, priority, tenant)

    def generate(self, submit: Submit) -> Stream:
        left = submit.seconds_left()
        if left is not None and left <= 0:
            raise DeadlineExceeded("The request's deadline has passed before it was begun.")
        params = submit.params
        most = 0 if submit.pool is not None else 1 if submit.hands_over else params.max_tokens
        ticket = self.admission.enter(
            len(submit.prompt), params.n, most, submit.priority, submit.tenant, admitted=submit.admitted
        )
        submit = replace(submit, id=next(self._numbers))
        size = preparation(submit)
        stream = Stream(self, submit.id, ticket, prepared=not size)
        self._streams[stream.id] = weakref.ref(stream)
        try:
            self._send(postponed(submit, size, stream.batch) if size else Enqueue(submit), stream.id)
        except BaseException as error:
            stream.end()
            if isinstance(error, BankfullError):
                raise
            if isinstance(error, (TypeError, ValueError, OverflowError)):
                raise RequestError(f"The request cannot be passed on to the engine: {error}.") from None
            raise
        if left is not None:
            stream.set_deadline(left)
        return stream

    # -- state that another engine computes

    def expect_state(self, prompt: list[int], salt: str, tenant: str, on_room: OnRoom) -> int:
        """The engine shall get the state of this prompt from another one; the number of the expectation, which
        `forget_state` or the request that names it ends. Raises Unavailable."""
        number = next(self._numbers)
        self._send(Expect(number, prompt, salt, tenant))
        self._rooms[number] = on_room
        return number

    def state_arrived(self, number: int, names: list[bytes]) -> None:
        with suppress(Unavailable):  # it has just ended, and its exchange with it
            self._send(Arrived(number, names))

    def ship_state(self, on_shipped: OnShipped) -> int:
        """Begin an order of state for another engine; its number."""
        number = next(self._numbers)
        self._shipments[number] = on_shipped
        return number

    def ship_more(
        self, number: int, exchange: int, places: list[tuple[bytes, int]], at: tuple[str, int] | None
    ) -> None:
        """Copy this content to the exchange as soon as it is computed. `at`: where its engine listens, without shared
        memory."""
        with suppress(Unavailable):
            self._send(Ship(number, exchange, places, at))

    def forget_state(self, number: int, *, told: bool = True) -> None:
        """Nobody waits any longer for this expectation, or this order. `told`: the engine does not know it yet."""
        known = self._rooms.pop(number, None) is not None
        known |= self._shipments.pop(number, None) is not None
        if known and told:
            with suppress(Unavailable):
                self._send(Abort([number]))

    async def wait_all_ready(self) -> None:
        """Wait until the engine is ready, as a set of replicas waits for all of its own."""
        await self.wait_ready()

    async def reset_cache(self) -> int:
        freed: int = await self._ask(ResetCache)
        return freed

    async def page_tables(self) -> dict[str, PageTables]:
        return {"": await self._ask(ShowPages)}

    async def _ask(self, kind: type[ResetCache] | type[ShowPages]) -> Any:
        question = next(self._numbers)
        self._send(kind(question))
        reply = self._questions[question] = asyncio.get_running_loop().create_future()
        try:
            return await reply
        finally:
            self._questions.pop(question, None)

    async def drain(self, grace: float) -> None:
        """Refuse new requests; running ones may finish within `grace` seconds. Batch work is aborted: it is on disk and
        continues after a restart."""
        self._draining = True
        self.admission.close(SHUTTING_DOWN)
        for stream in self._live():
            if stream.batch:
                self.drop(stream, Unavailable(STOPPED))
        end = time.monotonic() + grace
        while self._streams and (left := end - time.monotonic()) > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left)
        for stream in self._live():
            self.drop(stream, Unavailable(STOPPED))

    def _has_requests(self) -> bool:
        return any(stream.prepared for stream in self._live())

    def _fail_requests(self, error: BankfullError) -> None:
        for stream in self._live():
            stream.fail(error)
        for question in self._questions.values():
            if not question.done():
                question.set_exception(error)
        rooms, self._rooms = self._rooms, {}
        shipments, self._shipments = self._shipments, {}
        for on_room in rooms.values():
            on_room(None)
        for on_shipped in shipments.values():
            on_shipped(None)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # -- to the engine

    def _send(self, message: ToEngine, request: int | None = None) -> None:
        if self._engine is None:
            raise Unavailable("There is no engine right now; ask again in a moment.")
        self._engine.send(pack(message), request)

    def _abort(self, request: int) -> None:
        if self._engine is not None and not self._engine.withdraw(request):
            with suppress(Unavailable):  # it has just ended, and the request with it
                self._engine.send(pack(Abort([request])))

    def drop(self, stream: Stream, error: BankfullError) -> None:
        """Abort a request with an error."""
        if not stream.ended:
            self._abort(stream.id)
            stream.fail(error)

    # -- requests that end

    def _live(self) -> list[Stream]:
        return [stream for stream in (known() for known in self._streams.values()) if stream is not None]

    def _stream(self, request: int) -> Stream | None:
        known = self._streams.get(request)
        return None if known is None else known()

    def expire(self, request: int) -> None:
        if (stream := self._stream(request)) is not None:
            self.drop(stream, DeadlineExceeded("The request's deadline has passed before its answer was complete."))

    def abandon(self, request: int, ticket: Ticket, timer: asyncio.TimerHandle | None) -> None:
        """The client of a request that has not ended is gone."""
        self._abort(request)
        self.forget(request, ticket, timer)

    def forget(self, request: int, ticket: Ticket, timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()
        self._streams.pop(request, None)
        self.admission.leave(ticket)
        self._notify()

    # -- from the engine

    def _receive(self, message: FromEngine) -> None:
        match message:
            case StepMessage():
                self._steps += 1
                self._load = message.load
                self._deal(message)
                if message.prefixes is not None and self.on_prefixes is not None:
                    self.on_prefixes(message.prefixes)
            case Begun():
                for request in message.ids:
                    if (stream := self._stream(request)) is not None:
                        stream.worked_on = not message.waits
                        if message.runs and stream.on_run is not None:
                            stream.on_run()
            case Refused():
                if (stream := self._stream(message.id)) is not None:
                    stream.fail(_error_of(message))
            case Forgotten():
                if (question := self._questions.get(message.id)) is not None and not question.done():
                    question.set_result(message.pages)
            case PagesShown():
                if (question := self._questions.get(message.id)) is not None and not question.done():
                    question.set_result(message.tables)
            case RoomGranted():
                if (on_room := self._rooms.get(message.id)) is not None:
                    on_room(message)
            case Shipped():
                if (on_shipped := self._shipments.get(message.id)) is not None:
                    on_shipped(message)
            case LoadingPhase():
                self.phase = message.text
                log.info("The engine is %s.", message.text)
            case Failed():
                self._refusal = message.message
            case Ready():
                self._begin(message)

    def _deal(self, step: StepMessage) -> None:
        """Distribute the deltas of a step. This runs for every token of every stream, and wakes each stream once."""
        streams = self._streams
        woken = []
        for delta in step.deltas:
            known = streams.get(delta.request_id)
            if known is not None and (stream := known()) is not None:
                if not stream.items:
                    woken.append(stream)
                stream.items.append(delta)
        for done in step.done:
            known = streams.get(done.id)
            if known is not None and (stream := known()) is not None:
                if not stream.items:
                    woken.append(stream)
                stream.items.append(done)
                stream.end()
        for stream in woken:
            stream.wake()


def _error_of(refused: Refused) -> BankfullError:
    if refused.kind == "request":
        return RequestError(refused.message)
    if refused.kind == "busy":
        return Busy(refused.message, 1.0)
    return EngineFault(refused.message)
