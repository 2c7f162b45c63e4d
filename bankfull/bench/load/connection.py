"""A minimal HTTP/1.1 client: one request, one response, and the arrival time of each part of it.

Arrival times are kernel timestamps, so they hold while the client is stalled. Without them (TLS, no support in the
system, or a loop with another clock) they are the times at which the loop read the bytes.

During a run only the HTTP framing is parsed; bodies are kept with their times and decoded afterwards.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from bankfull.bench.load.clock import PreciseLoop
from bankfull.bench.load.events import Part
from bankfull.bench.load.stamped import StampedSocket, connect
from bankfull.errors import ConfigError

if TYPE_CHECKING:
    from bankfull.bench.load.server import ServerAddress

SPARE = 16
"""Connections kept open in advance, so that connecting does not count as server latency."""


def _parser(connection: ClientConnection) -> Any:
    try:
        from httptools import HttpResponseParser
    except ModuleNotFoundError:
        raise ConfigError("Load tests need httptools: install bankfull[serve].") from None
    return HttpResponseParser(connection)


class Exchange:
    """One request and its response, in the loop's time."""

    __slots__ = ("done", "due", "ended", "error", "parts", "request", "retried", "sent", "stamped", "status")

    def __init__(self, request: bytes, due: float, done: Callable[[Exchange], None]) -> None:
        self.request, self.due, self.done = request, due, done
        self.sent: float | None = None
        self.ended: float | None = None
        self.status = 0
        self.parts: list[Part] = []
        self.stamped = True
        """Whether all part times are kernel timestamps."""
        self.error: str | None = None
        self.retried = False

    def end(self, at: float, error: str | None = None) -> None:
        self.ended, self.error = at, error
        self.done(self)


class ClientConnection(asyncio.Protocol):
    def __init__(self, pool: ConnectionPool, line: StampedSocket | None) -> None:
        self._pool, self._line = pool, line
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._now = 0.0
        self._framed = False
        """Whether the response declares its length."""
        self._began = False
        self.alive = False
        self._parser = _parser(self)

    # -- callbacks of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.alive = transport, True

    def data_received(self, data: bytes) -> None:
        came = None if self._line is None else self._line.came
        self._now = self._pool.clock() if came is None else came
        if (exchange := self._exchange) is not None:
            exchange.stamped &= came is not None
            if exchange.sent is not None:  # a stall between write() and clock() makes `sent` too late
                exchange.sent = min(exchange.sent, self._now)
        try:
            self._parser.feed_data(data)
        except Exception as error:  # httptools raises many types; all mean invalid HTTP
            self._finish(f"invalid HTTP ({error})")
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.alive = False
        self._pool.forget(self)
        exchange = self._exchange
        if exchange is None:
            return
        if self._began and not self._framed and error is None:
            self._finish(None)
        elif not self._began and not exchange.retried:
            # The server may close an idle connection at the moment of its reuse: retry once.
            self._exchange, exchange.retried, exchange.sent = None, True, None
            self._pool.send_again(exchange)
        else:
            self._finish("the connection was closed before the response was complete")

    # -- callbacks of httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._framed = True

    def on_headers_complete(self) -> None:
        self._began = True
        if self._exchange is not None:
            self._exchange.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        if self._exchange is not None:
            self._exchange.parts.append((self._now, data))

    def on_message_complete(self) -> None:
        if self._parser.should_keep_alive() and self.alive:
            self._finish(None, reuse=True)
        else:
            self._finish(None)
            self.close()

    # -- interface for the pool

    def start(self, exchange: Exchange) -> None:
        assert self._transport is not None
        self._exchange, self._framed, self._began = exchange, False, False
        self._transport.write(exchange.request)
        exchange.sent = self._pool.clock()

    def carries(self, exchange: Exchange) -> bool:
        return self._exchange is exchange

    def drop(self, reason: str) -> None:
        """Abort the current exchange."""
        self._now = self._pool.clock()
        self._finish(reason)
        self.close()

    def close(self) -> None:
        self.alive = False
        if self._transport is not None:
            self._transport.abort()

    def _finish(self, error: str | None, reuse: bool = False) -> None:
        exchange, self._exchange = self._exchange, None
        if reuse:
            self._pool.give(self)  # before `done`, so that a waiting request can use this connection
        if exchange is not None:
            exchange.end(self._now if error is None else self._pool.clock(), error)


class ConnectionPool:
    """Connections to one server. With `max_concurrency`, further requests queue; their latency includes the wait."""

    def __init__(self, address: ServerAddress, max_concurrency: int | None = None, spare: int = SPARE) -> None:
        self._address, self._max_concurrency = address, max_concurrency
        self.clock = asyncio.get_running_loop().time
        self._spare = spare if max_concurrency is None else min(spare, max_concurrency)
        self._context = address.context
        self._idle: list[ClientConnection] = []
        self._all: set[ClientConnection] = set()
        self._waiting: deque[Exchange] = deque()
        self._opening: set[asyncio.Task[None]] = set()
        self._busy = 0

    async def warm_up(self) -> None:
        """Open the spare connections; fails at once if the server is unreachable."""
        try:
            opened = await asyncio.gather(*(self._open() for _ in range(self._spare)))
        except OSError as error:
            raise ConfigError(f"The server at {self._address.url} cannot be reached ({error}).") from None
        self._idle.extend(opened)

    def send(self, exchange: Exchange) -> None:
        if self._max_concurrency is not None and self._busy >= self._max_concurrency:
            self._waiting.append(exchange)
            return
        self._busy += 1
        while self._idle:
            connection = self._idle.pop()
            if connection.alive:
                connection.start(exchange)
                break
        else:
            self._in_background(self._open_for(exchange))
        if self._max_concurrency is None and len(self._idle) + len(self._opening) < self._spare:
            self._in_background(self._open_spare())

    def send_again(self, exchange: Exchange) -> None:
        self._busy -= 1
        self.send(exchange)

    def give(self, connection: ClientConnection) -> None:
        self._idle.append(connection)

    def ended(self) -> None:
        """Count a completed request, and send a queued one."""
        self._busy -= 1
        if self._waiting:
            self.send(self._waiting.popleft())

    def drop(self, exchange: Exchange, reason: str) -> None:
        for connection in self._all:
            if connection.carries(exchange):
                connection.drop(reason)
                return
        with suppress(ValueError):
            self._waiting.remove(exchange)
            self._busy += 1  # compensates `ended`, since a queued request was not counted
        if exchange.ended is None:
            exchange.end(self.clock(), reason)

    def forget(self, connection: ClientConnection) -> None:
        self._all.discard(connection)
        with suppress(ValueError):
            self._idle.remove(connection)

    async def close(self) -> None:
        for task in self._opening:
            task.cancel()
        for connection in list(self._all):
            connection.close()
        await asyncio.sleep(0)

    async def _open(self) -> ClientConnection:
        place, loop = self._address, asyncio.get_running_loop()
        if self._context is None and isinstance(loop, PreciseLoop):
            line = await connect(place.ip, place.port, loop.stamps)
            _, connection = await loop.create_connection(lambda: ClientConnection(self, line), sock=line)
        else:
            _, connection = await loop.create_connection(
                lambda: ClientConnection(self, None),
                place.ip,
                place.port,
                ssl=self._context,
                server_hostname=place.host if self._context is not None else None,
            )
        self._all.add(connection)
        return connection

    async def _open_for(self, exchange: Exchange) -> None:
        try:
            connection = await self._open()
        except OSError as error:
            exchange.end(self.clock(), f"connection failed ({error.strerror or error})")
            return
        if exchange.ended is None:
            connection.start(exchange)
        else:
            self.give(connection)

    async def _open_spare(self) -> None:
        with suppress(OSError):
            self._idle.append(await self._open())

    def _in_background(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)
