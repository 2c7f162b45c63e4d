"""How the service listens: uvicorn's options, and the limits of a connection that uvicorn leaves to others."""

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
from bankfull.serve.guard.lobby import MAX_CONNECTIONS, RESERVED_CONNECTIONS, Guest, Lobby, Place, address_of
from bankfull.serve.guard.tls import Certificates

log = logging.getLogger("bankfull.serve")

HEAD_SECONDS = 10.0
HEAD_BYTES = 64 << 10
PIECE_BYTES = 64 << 10
KEEP_ALIVE_SECONDS = 75
OTHER_FILES = 512
"""That are open for other purposes than connections."""


def uvicorn_config(
    app: Any,
    host: str,
    port: int,
    *,
    lobby: Lobby | None = None,
    certificates: Certificates | None = None,
    http: type[Connection] | None = None,
    **more: Any,
) -> uvicorn.Config:
    """No access log (we write our own), no websockets, no trust in headers that a proxy may or may not have written."""
    options: dict[str, Any] = {
        "http": Reception(http or Connection, lobby or Lobby(), certificates),
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
    """Each connection is an open file, and the usual limit of 1,024 is for programs with few. How many connections the
    system then allows: where it does not allow that many files, those for other purposes come first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + RESERVED_CONNECTIONS + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    possible = max(1, soft - RESERVED_CONNECTIONS - OTHER_FILES if soft > 2 * OTHER_FILES else soft // 4)
    log.warning("the system allows %d open files: at most %d connections", soft, possible)
    return possible


class Reception:
    """Makes what serves each new connection. uvicorn takes it for the class of its protocol."""

    def __init__(self, connection: type[Connection], lobby: Lobby, certificates: Certificates | None) -> None:
        self._connection, self._lobby, self._certificates = connection, lobby, certificates

    def __call__(self, **given: Any) -> asyncio.Protocol:
        connection = self._connection(lobby=self._lobby, **given)
        return connection if self._certificates is None else Arrival(connection, self._lobby, self._certificates)


class Arrival(asyncio.Protocol):
    """A connection that has to speak TLS first. It has its place, and its time limit, from its first moment; the event
    loop's own server would tell us of it only after the handshake, and keep the certificates of its start."""

    def __init__(self, connection: Connection, lobby: Lobby, certificates: Certificates) -> None:
        self._connection, self._lobby, self._certificates = connection, lobby, certificates

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        plain = cast(asyncio.Transport, transport)
        self._connection.arrive(plain)
        if self._lobby.enter(self._connection) is Place.NONE:
            plain.abort()  # it could not read an answer
            return
        # Nothing was read yet. A second file of the same socket gets a transport that speaks TLS from the beginning.
        shown = plain.get_extra_info("socket")
        own = socket.socket(shown.family, shown.type, shown.proto, fileno=os.dup(shown.fileno()))
        plain.abort()
        self._connection.shaking_hands = asyncio.get_running_loop().create_task(self._shake_hands(own))

    async def _shake_hands(self, own: socket.socket) -> None:
        own.setblocking(False)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._connection, own, ssl=self._certificates.context, ssl_handshake_timeout=HEAD_SECONDS
            )
        except (OSError, RuntimeError, asyncio.CancelledError):  # what strangers send is no error of ours
            self._lobby.leave(self._connection)
            own.close()
        self._connection.shaking_hands = None


class HeadHeld:
    """The transport of one answer, whose first write, its head, waits for the second one: both are then one packet, and
    wake the client once. A head that nothing follows at once is sent in the event loop's next turn."""

    __slots__ = ("_begun", "_connection", "_held", "_transport")

    def __init__(self, connection: Connection) -> None:
        self._connection, self._transport = connection, connection.transport
        self._begun = False
        self._held = b""

    def write(self, data: bytes) -> None:
        if not self._begun:
            self._begun = True
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


class InPieces:
    """Sends what is too large for a transport's buffer piece by piece, as fast as the client reads. The buffer would
    take it all, and hold it as long as the client likes."""

    __slots__ = ("_guest", "_lobby", "_send")

    def __init__(self, guest: Guest, send: Callable[[Any], Coroutine[Any, Any, None]], lobby: Lobby) -> None:
        self._guest, self._send, self._lobby = guest, send, lobby

    def __call__(self, message: Any) -> Coroutine[Any, Any, None]:
        body = message.get("body", b"")
        return self._send(message) if len(body) <= PIECE_BYTES else self._send_all(message, body)

    async def _send_all(self, message: Any, body: bytes) -> None:
        with self._lobby.holding(self._guest, len(body)):
            for start in range(0, len(body), PIECE_BYTES):
                piece = body[start : start + PIECE_BYTES]
                more = message.get("more_body", False) or start + PIECE_BYTES < len(body)
                await self._send({**message, "body": piece, "more_body": more})
                self._lobby.sent(self._guest, len(piece))


class Connection(HttpToolsProtocol, Guest):
    """uvicorn's connection, with a limit on the size of a request's head and on the time that it takes to arrive, from
    the first moment on; with a place in the lobby; and with answers whose head goes out with what follows.

    It has no other place for them: an application is called when the whole head is there.
    """

    shaking_hands: asyncio.Task[None] | None = None
    """With TLS, at first: there is nothing to talk to yet."""
    _arrived = False
    _head_bytes = 0
    _in_head = True
    _head_timer: asyncio.TimerHandle | None = None

    def __init__(self, *given: Any, lobby: Lobby, **more: Any) -> None:
        super().__init__(*given, **more)
        self._lobby = lobby

    def arrive(self, transport: asyncio.Transport) -> None:
        """It is there, and may not speak yet."""
        self.transport = transport
        self.address = address_of(get_remote_addr(transport))
        self._arrived = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._arrived:
            self.arrive(transport)
            self._lobby.enter(self)
        if self.place is Place.NONE:
            self._refuse(503, "Too many connections are open; try again later.")
        else:
            self._start_timer()

    def cut(self) -> None:
        self._end(self.transport.abort)

    def show_out(self) -> None:
        self._end(super().show_out)

    def _end(self, end: Callable[[], None]) -> None:
        if self.shaking_hands is None:
            end()
        else:
            self.shaking_hands.cancel()

    def write(self, data: bytes) -> None:
        self.written += len(data)
        self.transport.write(data)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
            if self.cycle is None or self.cycle.response_complete:  # else it has time until it was answered
                self._start_timer()
        super().data_received(data)
        if self._in_head and self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
            self._refuse(431, f"The head of the request has more than {HEAD_BYTES} bytes; send fewer headers.")

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        self._lobby.busy(self)
        cast(dict[str, Any], self.scope)[ON_RESERVE] = self._lobby.on_reserve_still(self)
        super().on_headers_complete()
        if self.cycle is not None:  # it has not run yet
            self.cycle.transport = cast(asyncio.Transport, HeadHeld(self))
            self.cycle.send = InPieces(self, self.cycle.send, self._lobby)  # type: ignore[method-assign]

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head, self._head_bytes = True, 0

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # else the next request has been here before
            self._lobby.wait(self)
            if self._in_head and self._head_bytes:
                self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._lobby.leave(self)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "This is not an HTTP request that can be read.")

    def _give_up(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        if not self._head_bytes:
            self.transport.close()  # it has asked nothing
        else:
            self._refuse(408, f"The head of the request did not arrive within {HEAD_SECONDS:g} seconds.")

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
