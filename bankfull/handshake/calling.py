"""The caller's end of the handshake, on an event loop."""

from __future__ import annotations

import asyncio
import socket

from bankfull.handshake.proof import GREETING, REPLY, CallerSide, SessionKeys

HANDSHAKE_SECONDS = 5.0
"""Time for the whole handshake."""


CUT_OFF_PAUSE = 0.05
"""Seconds before another attempt, when the other end has closed a connection in its handshake; doubled each time."""


class CutOff(ConnectionError):
    """The other end has closed the connection in its handshake: it had to make room, or has just ended."""


async def reach(
    address: tuple[str, int], token: bytes, purpose: bytes, subject: bytes
) -> tuple[socket.socket, SessionKeys]:
    """A connection whose other end has proven that it knows the token. Raises HandshakeRefused or OSError."""
    async with asyncio.timeout(HANDSHAKE_SECONDS):
        pause = CUT_OFF_PAUSE
        while True:
            try:
                return await _reach_once(address, token, purpose, subject)
            except (CutOff, ConnectionResetError, BrokenPipeError):
                await asyncio.sleep(pause)
                pause *= 2


async def _reach_once(
    address: tuple[str, int], token: bytes, purpose: bytes, subject: bytes
) -> tuple[socket.socket, SessionKeys]:
    loop = asyncio.get_running_loop()
    addresses = await loop.getaddrinfo(*address, type=socket.SOCK_STREAM)
    connection = socket.socket(*addresses[0][:3])
    try:
        connection.setblocking(False)
        tune(connection)
        await loop.sock_connect(connection, addresses[0][4])
        return connection, await call(connection, token, purpose, subject)
    except BaseException:
        connection.close()
        raise


async def call(connection: socket.socket, token: bytes, purpose: bytes, subject: bytes) -> SessionKeys:
    """Raises HandshakeRefused, ConnectionError or TimeoutError."""
    loop, caller = asyncio.get_running_loop(), CallerSide(token, purpose, subject)
    async with asyncio.timeout(HANDSHAKE_SECONDS):
        await loop.sock_sendall(connection, caller.hello)
        await loop.sock_sendall(connection, caller.proof(await exactly(connection, GREETING.size)))
        return caller.judge(await exactly(connection, REPLY.size))


async def exactly(connection: socket.socket, size: int) -> bytes:
    """Never reads further: the bytes behind a handshake belong to the engine process."""
    got = bytearray()
    while len(got) < size:
        part = await asyncio.get_running_loop().sock_recv(connection, size - len(got))
        if not part:
            raise CutOff("the connection was closed during the handshake")
        got += part
    return bytes(got)


def tune(connection: socket.socket) -> None:
    """Send small messages at once, and notice within about 15 seconds that the other machine is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 15_000)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
