"""The handshake between the API and the gateway of a replica: both prove that they know the cluster's token. Rank 0 and
the hosts of the other ranks use it, too, with a token of their own.

The gateway sends a greeting with its versions and a nonce. The API answers with its own, its purpose, and an
HMAC-SHA256 of all of it. The gateway replies with one byte and an HMAC of its own, so that prompts never go to a
process that has taken over the gateway's port. All three have a fixed length: nothing is parsed before the other end
is known.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import bankfull
from bankfull.errors import BankfullError

log = logging.getLogger("bankfull.serve")

PROTOCOL = 1
"""Version of the messages in `wire` and of this handshake. Both ends must have the same."""
MAGIC = b"bankfull"
NONCE, SESSION, MAC = 32, 16, 32
"""Bytes of a nonce, of a session's name and of an HMAC."""
HANDSHAKE_SECONDS = 5.0
"""Time for the whole handshake."""
VERSION_BYTES = 32
MOST_UNKNOWN = 8
"""Connections in their handshake; further ones are closed at once."""
ACCEPT_PAUSE = 0.25
"""Seconds before connections are accepted again, when that has failed."""

CONTROL: Final = b"C"
"""Opens a session: the gateway sends its heartbeats, and reads commands."""
ENGINE: Final = b"E"
"""Becomes the socket of a new engine process, in the session that a CONTROL connection has opened."""
RANK: Final = b"R"
"""To the host of a rank: becomes the socket of the rank's process."""

ACCEPTED, WRONG_TOKEN, WRONG_VERSION, IN_USE, NO_SESSION, FAILED = b"+", b"T", b"V", b"U", b"S", b"F"

_GREETING = struct.Struct(f"<{len(MAGIC)}sH{VERSION_BYTES}s{NONCE}s")
_ANSWER = struct.Struct(f"<c{SESSION}sH{VERSION_BYTES}s{NONCE}s{MAC}s")
REPLY = struct.Struct(f"<c{MAC}s")
"""The outcome, and the gateway's HMAC if it accepts."""


class HandshakeRefused(BankfullError):
    """The two ends do not belong together. Another attempt would fail, too."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """An authenticated connection."""

    purpose: bytes
    session: bytes
    proof: bytes
    """The gateway's HMAC, sent with its reply."""


def own_version() -> bytes:
    return bankfull.__version__.encode()[:VERSION_BYTES]


async def call(connection: socket.socket, token: bytes, purpose: bytes, session: bytes) -> None:
    """The API's part. Raises HandshakeRefused, ConnectionError or TimeoutError."""
    async with asyncio.timeout(HANDSHAKE_SECONDS):
        loop = asyncio.get_running_loop()
        magic, protocol, version, nonce = _GREETING.unpack(await _exactly(connection, _GREETING.size))
        if magic != MAGIC:
            raise HandshakeRefused("The process at this address is not a gateway of bankfull.")
        _check_versions(protocol, version)
        own_nonce = secrets.token_bytes(NONCE)
        said = nonce + own_nonce + struct.pack("<H", PROTOCOL) + _padded(own_version()) + purpose + session
        proof = _mac(token, b"api", said)
        await loop.sock_sendall(
            connection, _ANSWER.pack(purpose, session, PROTOCOL, _padded(own_version()), own_nonce, proof)
        )
        reply, their_proof = REPLY.unpack(await _exactly(connection, REPLY.size))
        match reply:
            case b"T":
                raise HandshakeRefused("The gateway has another token: it belongs to another cluster.")
            case b"V":
                raise HandshakeRefused(
                    "The gateway runs another version of bankfull; install the same one on all nodes."
                )
            case b"U":
                raise ConnectionError("the replica is in use by another server")
            case b"S":
                raise ConnectionError("the gateway has ended the session")
            case b"F":
                raise ConnectionError("the gateway could not start the engine process")
        if not hmac.compare_digest(their_proof, _mac(token, b"gateway", said)):
            raise HandshakeRefused("The gateway could not prove that it knows the cluster's token.")


async def answer(connection: socket.socket, token: bytes) -> Wanted | None:
    """The gateway's part, without its reply; None: the other end was refused. Raises OSError."""
    async with asyncio.timeout(HANDSHAKE_SECONDS):
        nonce = secrets.token_bytes(NONCE)
        greeting = _GREETING.pack(MAGIC, PROTOCOL, _padded(own_version()), nonce)
        await asyncio.get_running_loop().sock_sendall(connection, greeting)
        purpose, session, protocol, version, own_nonce, proof = _ANSWER.unpack(await _exactly(connection, _ANSWER.size))
        said = nonce + own_nonce + struct.pack("<H", protocol) + version + purpose + session
        if not hmac.compare_digest(proof, _mac(token, b"api", said)):
            await reply(connection, WRONG_TOKEN)
            return None
        try:
            _check_versions(protocol, version)
        except HandshakeRefused:
            await reply(connection, WRONG_VERSION)
            return None
        return Wanted(purpose, session, _mac(token, b"gateway", said))


async def reply(connection: socket.socket, how: bytes, proof: bytes = bytes(MAC)) -> None:
    await asyncio.get_running_loop().sock_sendall(connection, REPLY.pack(how, proof))


def tune(connection: socket.socket) -> None:
    """Send small messages at once, and notice within about 15 seconds that the other machine is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 15_000)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class HandshakeListener(ABC):
    """Accepts connections, and serves those whose other end knows the token. Runs on one event loop."""

    name = "listener"
    """In the log."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._listening: socket.socket | None = None
        self._unknown = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int = 0) -> tuple[str, int]:
        """Listen, and return the address. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, port), family=family, backlog=MOST_UNKNOWN)
        self._listening.setblocking(False)
        self._begin(self._accept(self._listening))
        address: tuple[str, int] = self._listening.getsockname()[:2]
        return address

    async def close(self) -> None:
        """End all connections, and listen no more."""
        if self._listening is not None:
            self._listening.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @abstractmethod
    async def serve(self, connection: socket.socket, wanted: Wanted) -> None:
        """Serve a connection with a proof, which is closed afterwards. An OSError ends it in silence."""

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("A connection of the %s has failed.", self.name, exc_info=error)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError as error:  # too many open files, or a connection that has gone meanwhile
                log.error("The %s cannot accept a connection: %s.", self.name, error)
                await asyncio.sleep(ACCEPT_PAUSE)
                continue
            if self._unknown >= MOST_UNKNOWN:
                connection.close()
                continue
            self._unknown += 1
            self._begin(self._admit(connection))

    async def _admit(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):  # includes TimeoutError
            try:
                connection.setblocking(False)
                tune(connection)
                wanted = await answer(connection, self._token)
            finally:
                self._unknown -= 1
            if wanted is None:
                log.warning("A connection to the %s was refused: it has another token or version.", self.name)
            else:
                await self.serve(connection, wanted)


def _check_versions(protocol: int, version: bytes) -> None:
    theirs, ours = version.rstrip(b"\0").decode("ascii", "replace"), own_version().decode()
    if (protocol, theirs) != (PROTOCOL, ours):
        raise HandshakeRefused(
            f"The two ends run different versions of bankfull: {ours} with protocol {PROTOCOL} here, {theirs} with "
            f"protocol {protocol} there; install the same version on all nodes."
        )


def _padded(version: bytes) -> bytes:
    return version.ljust(VERSION_BYTES, b"\0")


def _mac(token: bytes, role: bytes, said: bytes) -> bytes:
    return hmac.digest(token, role + b"\0" + said, "sha256")


async def _exactly(connection: socket.socket, size: int) -> bytes:
    """Never reads further: the bytes behind a handshake belong to the engine process."""
    got = bytearray()
    while len(got) < size:
        part = await asyncio.get_running_loop().sock_recv(connection, size - len(got))
        if not part:
            raise ConnectionError("the connection was closed during the handshake")
        got += part
    return bytes(got)
