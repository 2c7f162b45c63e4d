"""Server-sent events: raw ASGI, one write per stream and engine step.

The response starts with the first events, so that a refused call still gets its proper status. If they take about as
long as a keep-alive interval, it starts with a comment instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any, Protocol

from bankfull.serve.api.errors import Problem, problem_of
from bankfull.serve.telemetry.trace import why_ended

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

SEND_BODY = "bankfull.send_body"
"""The key of an ASGI scope under which the outermost layer leaves the server's own `send`, for bodies: the layers add
only headers."""

LAST_WORDS_SECONDS = 1.0
"""Seconds for the last events of a stream that the server itself ends."""
COMMENT = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class EventStream(Protocol):
    """Events as bytes: each item has the events of one engine step, ready to be sent."""

    async def __anext__(self) -> bytes: ...

    async def aclose(self) -> None:
        """Abort the request if it still runs."""
        ...

    def failure(self, problem: Problem) -> bytes:
        """The last events of a stream that fails."""
        ...


def event(data: bytes, name: str | None = None) -> bytes:
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + data + b"\n\n"


class Pulse:
    """Sends keep-alive comments to all silent streams: one timer for the whole server."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._writers: set[Writer] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._comments: set[asyncio.Task[None]] = set()

    def add(self, writer: Writer) -> None:
        self._writers.add(writer)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.seconds / 4, self._beat)

    def remove(self, writer: Writer) -> None:
        self._writers.discard(writer)
        if not self._writers and self._timer is not None:
            self._timer.cancel()  # an idle server needs no timer
            self._timer = None

    def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self.seconds / 4, self._beat)
        for writer in self._writers:
            if writer.silent_since + self.seconds * 0.75 < loop.time():
                # A task each: a client that does not read must not hold up the comments of the others.
                task = loop.create_task(writer.comment())
                self._comments.add(task)
                task.add_done_callback(self._comments.discard)


class Writer:
    """The sending half of one stream. `send` starts the response, through all layers that add headers; `send_body`,
    which may be the server's own, sends the rest."""

    __slots__ = ("_begin", "_headers", "_loop", "_open", "_send", "_turn", "begun", "silent_since")

    def __init__(self, send: Send, send_body: Send, headers: list[tuple[bytes, bytes]] | None = None) -> None:
        self._headers = HEADERS + (headers or [])
        self._begin, self._send = send, send_body
        self._turn = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._open = True
        self.begun = False
        """Whether the response has started, with status 200."""
        self.silent_since = self._loop.time()

    async def begin(self) -> None:
        async with self._turn:
            await self._begin_once()

    async def write(self, events: bytes) -> None:
        async with self._turn:
            self.silent_since = self._loop.time()
            await self._begin_once()
            await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def _begin_once(self) -> None:
        if not self.begun:
            self.begun = True
            await self._begin({"type": "http.response.start", "status": 200, "headers": self._headers})

    async def comment(self) -> None:
        if not self._turn.locked():
            async with self._turn:
                if self._open:
                    self.silent_since = self._loop.time()
                    with suppress(OSError):
                        await self._begin_once()
                        await self._send({"type": "http.response.body", "body": COMMENT, "more_body": True})

    async def end(self) -> None:
        async with self._turn:
            self._open = False
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})


async def send_events(
    stream: EventStream,
    send: Send,
    pulse: Pulse,
    send_body: Send | None = None,
    headers: list[tuple[bytes, bytes]] | None = None,
) -> None:
    """Raises errors until the response has started; later ones become the stream's last event, like the server's own
    reason for cancelling it."""
    writer = Writer(send, send_body or send, headers)
    pulse.add(writer)  # starts the response if its first events take long
    try:
        try:
            while True:
                events = await stream.__anext__()
                await (writer.write(events) if events else writer.begin())
        except StopAsyncIteration:
            pass
        except Exception as error:
            if not writer.begun:
                raise
            await writer.write(stream.failure(problem_of(error)))
        except asyncio.CancelledError:
            if writer.begun:  # a client that has left gets nothing
                with suppress(TimeoutError):
                    async with asyncio.timeout(LAST_WORDS_SECONDS):
                        await writer.write(stream.failure(problem_of(why_ended())))
                        await writer.end()
            raise
        finally:
            pulse.remove(writer)
        await writer.begin()
        await writer.end()
    finally:
        await stream.aclose()
