"""The HTTP listener: uvicorn's options, and the connection limits that uvicorn does not have."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
from collections.abc import Callable, Coroutine
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.utils import get_remote_addr

from bankfull.serve.api.calls import ON_RESERVE
from bankfull.serve.api.errors import Problem, openai_error
from bankfull.serve.guard.connections import (
    MAX_CONNECTIONS,
    RESERVED_CONNECTIONS,
    ConnectionTable,
    Slot,
    TrackedConnection,
    address_of,
)
from bankfull.serve.guard.tls import Certificates

log = logging.getLogger("bankfull.serve")

HEAD_SECONDS = 10.0
HEAD_BYTES = 64 << 10
CHUNK_BYTES = 64 << 10
KEEP_ALIVE_SECONDS = 75
OTHER_FILES = 512
"""File descriptors kept for purposes other than connections."""


def uvicorn_config(
    app: Any,
    host: str,
    port: int,
    *,
    connection_table: ConnectionTable | None = None,
    certificates: Certificates | None = None,
    http: type[Connection] | None = None,
    **more: Any,
) -> uvicorn.Config:
    """No access log (the service writes its own), no websockets, and no trust in proxy headers, which any client can
    forge."""
    options: dict[str, Any] = {
        "http": ProtocolFactory(http or Connection, connection_table or ConnectionTable(), certificates),
        "ws": "none",
        "loop": "uvloop",
        "lifespan": "on",
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,
        "timeout_keep_alive": KEEP_ALIVE_SECONDS,
        "backlog": 2048,
    }
    config = uvicorn.Config(app, host=host, port=port, **(options | more))
    config.load()
    return config


def raise_file_limit(connections: int = MAX_CONNECTIONS) -> int:
    """Raise the limit of open files, because each connection is one and the usual limit of 1,024 is too low. Return how
    many connections the limit allows after other purposes are served."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + RESERVED_CONNECTIONS + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    possible = max(1, soft - RESERVED_CONNECTIONS - OTHER_FILES if soft > 2 * OTHER_FILES else soft // 4)
    log.warning("the system allows %d open files; limiting connections to %d", soft, possible)
    return possible


class ProtocolFactory:
    """Creates the protocol of each new connection. uvicorn uses it as its protocol class."""

    def __init__(
        self, connection: type[Connection], connection_table: ConnectionTable, certificates: Certificates | None
    ) -> None:
        self._connection, self._table, self._certificates = connection, connection_table, certificates

    def __call__(self, **arguments: Any) -> asyncio.Protocol:
        connection = self._connection(connection_table=self._table, **arguments)
        return connection if self._certificates is None else TlsHandshake(connection, self._table, self._certificates)


class TlsHandshake(asyncio.Protocol):
    """A connection during its TLS handshake. It counts as a connection and has a time-out from the start. The server of
    the event loop would report it only after the handshake, and would keep using the certificates of the start."""

    def __init__(self, connection: Connection, connection_table: ConnectionTable, certificates: Certificates) -> None:
        self._connection, self._table, self._certificates = connection, connection_table, certificates

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        plain = cast(asyncio.Transport, transport)
        self._connection.arrive(plain)
        if self._table.add(self._connection) is Slot.NONE:
            plain.abort()  # it could not read a response before the handshake
            return
        # Nothing was read yet. A duplicate descriptor of the socket gets a transport that starts with TLS.
        shown = plain.get_extra_info("socket")
        duplicate = socket.socket(shown.family, shown.type, shown.proto, fileno=os.dup(shown.fileno()))
        plain.abort()
        self._connection.handshake = asyncio.get_running_loop().create_task(self._run_handshake(duplicate))

    async def _run_handshake(self, own: socket.socket) -> None:
        own.setblocking(False)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._connection, own, ssl=self._certificates.context, ssl_handshake_timeout=HEAD_SECONDS
            )
        except (OSError, RuntimeError, asyncio.CancelledError):  # a bad handshake is the client's error
            self._table.remove(self._connection)
            own.close()
        self._connection.handshake = None


class CoalescedHead:
    """A transport that holds back the first write of a response, its head, until the second write. Both then go out
    in one packet and wake the client once. A head without a second write is sent in the next iteration of the event
    loop."""

    __slots__ = ("_connection", "_held", "_started", "_transport")

    def __init__(self, connection: Connection) -> None:
        self._connection, self._transport = connection, connection.transport
        self._started = False
        self._held = b""

    def write(self, data: bytes) -> None:
        if not self._started:
            self._started = True
            self._held = data
            self._connection.loop.call_soon(self._send_held)
        elif self._held:
            data, self._held = self._held + data, b""
            self._connection.write(data)
        else:
            self._connection.write(data)

    def close(self) -> None:
        self._send_held()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _send_held(self) -> None:
        if self._held:
            data, self._held = self._held, b""
            self._connection.write(data)


class ChunkedSender:
    """Sends a large body in chunks, as fast as the client reads. The transport would buffer all of it for as long as
    the client does not read."""

    __slots__ = ("_connection", "_send", "_table")

    def __init__(
        self,
        connection: TrackedConnection,
        send: Callable[[Any], Coroutine[Any, Any, None]],
        connection_table: ConnectionTable,
    ) -> None:
        self._connection, self._send, self._table = connection, send, connection_table

    def __call__(self, message: Any) -> Coroutine[Any, Any, None]:
        body = message.get("body", b"")
        return self._send(message) if len(body) <= CHUNK_BYTES else self._send_all(message, body)

    async def _send_all(self, message: Any, body: bytes) -> None:
        with self._table.holding(self._connection, len(body)):
            for start in range(0, len(body), CHUNK_BYTES):
                piece = body[start : start + CHUNK_BYTES]
                more = message.get("more_body", False) or start + CHUNK_BYTES < len(body)
                await self._send({**message, "body": piece, "more_body": more})
                self._table.sent(self._connection, len(piece))


class Connection(HttpToolsProtocol, TrackedConnection):
    """uvicorn's connection with four additions: a limit on the size of the request head, a time-out for its arrival, an
    entry in the connection table, and responses whose head is sent together with the first part of the body.

    These belong here because an application is called only after the whole head has arrived.
    """

    handshake: asyncio.Task[None] | None = None
    """The running TLS handshake; until it ends, nothing can be sent."""
    _arrived = False
    _head_bytes = 0
    _in_head = True
    _head_timer: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, connection_table: ConnectionTable, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._table = connection_table

    def arrive(self, transport: asyncio.Transport) -> None:
        """Register the transport before any data is exchanged."""
        self.transport = transport
        self.address = address_of(get_remote_addr(transport))
        self._arrived = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._arrived:
            self.arrive(transport)
            self._table.add(self)
        if self.slot is Slot.NONE:
            self._refuse(503, "The server has too many open connections; try again later.")
        else:
            self._start_timer()

    def abort(self) -> None:
        self._end(self.transport.abort)

    def close_idle(self) -> None:
        self._end(super().close_idle)

    def _end(self, end: Callable[[], None]) -> None:
        if self.handshake is None:
            end()
        else:
            self.handshake.cancel()

    def write(self, data: bytes) -> None:
        self.written += len(data)
        self.transport.write(data)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
            # otherwise the time-out starts after the current response
            if self.cycle is None or self.cycle.response_complete:
                self._start_timer()
        super().data_received(data)
        if self._in_head and self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
            self._refuse(431, f"The request head is larger than {HEAD_BYTES} bytes; send fewer headers.")

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        self._table.mark_busy(self)
        cast(dict[str, Any], self.scope)[ON_RESERVE] = self._table.needs_reserve(self)
        super().on_headers_complete()
        if self.cycle is not None:  # it has not started yet
            if self._table.leaving:
                self.cycle.keep_alive = False
            self.cycle.transport = cast(asyncio.Transport, CoalescedHead(self))
            self.cycle.send = ChunkedSender(self, self.cycle.send, self._table)  # type: ignore[method-assign]

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head, self._head_bytes = True, 0

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # otherwise the next request was already received
            self._table.mark_idle(self)
            if self._in_head and self._head_bytes:
                self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._table.remove(self)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "The request is not valid HTTP.")

    def _give_up(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        if not self._head_bytes:
            self.transport.close()  # it has sent nothing
        else:
            self._refuse(408, f"The request head did not arrive within {HEAD_SECONDS:g} seconds.")

    def _start_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: int, message: str) -> None:
        body = openai_error(Problem(status, message, "invalid_request_error" if status < 500 else "server_error"))
        head = (
            f"HTTP/1.1 {status} Refused\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            "connection: close\r\n\r\n"
        )
        self.write(head.encode() + body)
        self.transport.close()
