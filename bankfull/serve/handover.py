"""A new server takes the place of an old one on the same port, without a refused or a reset connection.

The old server passes its listening socket over a Unix socket (SCM_RIGHTS). Both ends belong to the same user. Then it
closes its files and batches, because only one process may have them open; the new server opens them, accepts
connections, and confirms that. Only then the old one stops accepting. Connections that arrive meanwhile wait in the
queue of the listening socket, which both share. The old server answers what it has accepted, and ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from bankfull import paths
from bankfull.errors import ConfigError
from bankfull.scratch import ScratchFolder

log = logging.getLogger("bankfull.serve")

PROTOCOL = 1
MOST_BYTES = 1 << 12
"""Bytes of a message."""
ANSWER_SECONDS = 60.0
"""Time-out of an answer: the old server aborts the lines of its batches before it closes their store."""


def note_of(port: int) -> Path:
    """The file with the address of the server on this port, in the user's data directory."""
    return paths.data_dir() / "handover" / f"{port}.json"


class Predecessor:
    """The old server's end, for one port. A supervised task runs `run`."""

    def __init__(
        self,
        listening: socket.socket,
        host: str,
        data: Path | None,
        *,
        release: Callable[[], Awaitable[None]],
        leave: Callable[[], None],
    ) -> None:
        """`data`: the folder of files and batches; None: it is temporary. `release` closes it. `leave`: stop accepting,
        finish what was accepted, and end."""
        self._listening, self._host, self._data = listening, host, data
        self._release, self._leave = release, leave
        self._folder = ScratchFolder("handover")
        self._place = str(self._folder.path / "s")
        self._note = note_of(listening.getsockname()[1])
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.setblocking(False)
        self._socket.bind(self._place)
        self._socket.listen(1)

    def announce(self) -> None:
        """Write the note by which a new server finds this one. Raises OSError."""
        told = {"pid": os.getpid(), "socket": self._place, "host": self._host}
        told["data"] = None if self._data is None else str(self._data.resolve())
        self._note.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh = self._note.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps(told))
        fresh.rename(self._note)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(self._socket)
            with connection:
                connection.setblocking(False)
                try:
                    await self._serve(connection)
                except (OSError, ValueError) as error:
                    log.error("The hand-over of the listening socket has failed: %s", error)

    async def _serve(self, connection: socket.socket) -> None:
        """One new server. If it ends before it accepts connections, this one goes on."""
        if not same_user(connection):
            return
        released = False
        while (wanted := await _receive(connection)) is not None:
            match wanted:
                case {"do": "listener", "protocol": int(protocol)} if protocol == PROTOCOL:
                    told = json.dumps({"pid": os.getpid()}).encode() + b"\n"
                    socket.send_fds(connection, [told], [self._listening.fileno()])
                case {"do": "release"}:
                    await self._release()
                    released = True
                    await _send(connection, {})
                case {"do": "leave"}:
                    self._leave()
                    await _send(connection, {})
                    return
                case _:
                    await _send(connection, {"error": "it has another version of the hand-over"})
                    return
        if released:
            log.error(
                "The server that was to take over has ended. This one goes on, without files and batches: restart it, "
                "or start another one with --take-over."
            )

    def close(self) -> None:
        self._socket.close()
        self._folder.close()
        with suppress(OSError, ValueError, KeyError):
            if json.loads(self._note.read_text())["pid"] == os.getpid():  # else it is the new server's already
                self._note.unlink()


class Successor:
    """The new server's end."""

    def __init__(self, port: int, host: str, data: Path | None) -> None:
        """Raises ConfigError if there is no server to replace, or if its options differ where they must not."""
        self._where = f"port {port}"
        try:
            told = json.loads(note_of(port).read_text())
            self.pid, address = int(told["pid"]), str(told["socket"])
            self._connection = socket.socket(socket.AF_UNIX)
            self._connection.connect(address)
        except (OSError, ValueError, KeyError):
            raise ConfigError(
                f"There is no server of this user on {self._where} to take over from: leave out --take-over."
            ) from None
        self._connection.setblocking(False)
        folder = None if data is None else str(data.resolve())
        for option, old, new in (("--host", told.get("host"), host), ("--data-dir", told.get("data"), folder)):
            if old != new and old is not None:
                self.close()
                raise ConfigError(
                    f"The server on {self._where} was started with {option} {old}, this one with {new}: give the same."
                )

    async def listener(self) -> socket.socket:
        """The old server's listening socket."""
        await _send(self._connection, {"do": "listener", "protocol": PROTOCOL})
        async with asyncio.timeout(ANSWER_SECONDS):
            await _readable(self._connection)
        data, descriptors, _, _ = socket.recv_fds(self._connection, MOST_BYTES, 1)
        if not descriptors:
            raise ConfigError(f"The server on {self._where} does not pass on its socket: {_told(data)}.")
        listening = socket.socket(fileno=descriptors[0])
        # Both processes share the mode of the socket. Python sets it anew for a duplicate of what it takes for a
        # blocking socket, and the old server would block in its next `accept`.
        listening.setblocking(False)
        return listening

    async def release(self) -> None:
        """Files and batches are free after this."""
        await self._ask({"do": "release"})

    async def leave(self) -> None:
        """The old server stops accepting; this one does already."""
        await self._ask({"do": "leave"})
        self.close()

    def close(self) -> None:
        self._connection.close()

    async def _ask(self, command: dict[str, Any]) -> None:
        try:
            await _send(self._connection, command)
            async with asyncio.timeout(ANSWER_SECONDS):
                answer = await _receive(self._connection)
        except (OSError, ValueError) as error:
            raise ConfigError(f"The server {self.pid} on {self._where} does not answer: {error!r}.") from None
        if answer is None or "error" in answer:
            why = "it has ended" if answer is None else answer["error"]
            raise ConfigError(f"The server {self.pid} on {self._where} cannot be replaced: {why}.")


def same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end belongs to this user. Where the system does not tell, the permissions of the
    socket's folder decide."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(uid == os.getuid())


async def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    await asyncio.get_running_loop().sock_sendall(connection, json.dumps(message).encode() + b"\n")


async def _receive(connection: socket.socket) -> Any:
    """The next message; None at the end. Each end waits for the other's answer, so that one message comes at a time."""
    loop, read = asyncio.get_running_loop(), b""
    while not read.endswith(b"\n"):
        got = await loop.sock_recv(connection, MOST_BYTES)
        if not got or len(read) > MOST_BYTES:
            return None
        read += got
    return json.loads(read)


async def _readable(connection: socket.socket) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(connection)


def _told(data: bytes) -> str:
    with suppress(ValueError, KeyError, TypeError):
        return str(json.loads(data)["error"])
    return "it has ended"
