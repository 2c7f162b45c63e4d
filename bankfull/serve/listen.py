"""How the service listens: uvicorn's options, and the limits of a connection that uvicorn leaves to others."""

from __future__ import annotations

import asyncio
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from bankfull.errors import ConfigError
from bankfull.serve.errors import Problem, openai_error

HEAD_SECONDS = 10.0
HEAD_BYTES = 64 << 10
MAX_CONNECTIONS = 8192
KEEP_ALIVE_SECONDS = 75


@dataclass(frozen=True, slots=True)
class Tls:
    certificate: Path | None = None
    key: Path | None = None
    password: str | None = None
    client_authorities: Path | None = None
    """Whoever connects must show a certificate that one of these has signed."""

    def options(self) -> dict[str, Any]:
        if self.certificate is None:
            if self.key is not None or self.client_authorities is not None:
                raise ConfigError("--tls-key and --tls-client-ca need --tls-certificate.")
            return {}
        for file in (self.certificate, self.key, self.client_authorities):
            if file is not None and not file.is_file():
                raise ConfigError(f"The TLS file {file} does not exist.")
        options: dict[str, Any] = {
            "ssl_certfile": str(self.certificate), "ssl_keyfile": None if self.key is None else str(self.key),
            "ssl_keyfile_password": self.password,
        }  # fmt: skip
        if self.client_authorities is not None:
            import ssl

            options |= {"ssl_ca_certs": str(self.client_authorities), "ssl_cert_reqs": int(ssl.CERT_REQUIRED)}
        return options


def uvicorn_config(app: Any, host: str, port: int, *, tls: Tls | None = None, **more: Any) -> uvicorn.Config:
    """No access log (we write our own), no websockets, no trust in headers that a proxy may or may not have written."""
    options: dict[str, Any] = {
        "http": Connection, "ws": "none", "loop": "uvloop", "lifespan": "on", "log_config": None, "access_log": False,
        "server_header": False, "proxy_headers": False, "timeout_keep_alive": KEEP_ALIVE_SECONDS, "backlog": 2048,
    }  # fmt: skip
    config = uvicorn.Config(app, host=host, port=port, **(options | (tls or Tls()).options() | more))
    try:
        config.load()
    except OSError as error:  # ssl's errors among them
        raise ConfigError(f"The TLS certificate cannot be used: {error}.") from None
    return config


def raise_file_limit(connections: int = MAX_CONNECTIONS) -> None:
    """Each connection is an open file, and the usual limit of 1,024 is for programs with few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + 512
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class HeadHeld:
    """The transport of one answer, whose first write, its head, waits for the second one: both are then one packet, and
    wake the client once. A head that nothing follows at once is sent in the event loop's next turn."""

    __slots__ = ("_begun", "_held", "_loop", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._begun = False
        self._held = b""

    def write(self, data: bytes) -> None:
        if not self._begun:
            self._begun = True
            self._held = data
            self._loop.call_soon(self._send_held)
        elif self._held:
            data, self._held = self._held + data, b""
            self._transport.write(data)
        else:
            self._transport.write(data)

    def close(self) -> None:
        self._send_held()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _send_held(self) -> None:
        if self._held:
            data, self._held = self._held, b""
            self._transport.write(data)


class Connection(HttpToolsProtocol):
    """uvicorn's connection, with a limit on the size of a request's head and on the time that it takes to arrive, and
    with answers whose head goes out with what follows.

    It has no other place for them: an application is called when the whole head is there.
    """

    _head_bytes = 0
    _in_head = True
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            self._refuse(503, "Too many connections are open; try again later.")

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(HEAD_SECONDS, self._give_up)
        super().data_received(data)
        if self._in_head and self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
            self._refuse(431, f"The head of the request has more than {HEAD_BYTES} bytes; send fewer headers.")

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()
        if self.cycle is not None:  # it has not run yet
            self.cycle.transport = cast(asyncio.Transport, HeadHeld(self.transport, self.loop))

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head, self._head_bytes = True, 0

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "This is not an HTTP request that can be read.")

    def _give_up(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self._refuse(408, f"The head of the request did not arrive within {HEAD_SECONDS:g} seconds.")

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
        self.transport.write(head.encode() + body)
        self.transport.close()
