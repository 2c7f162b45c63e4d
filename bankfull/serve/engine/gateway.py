"""The gateway of a replica: a listener that starts an engine process for a server on another machine.

A server opens a session with a control connection and then one engine connection. The gateway passes the socket of the
second one to a fresh engine process: requests and tokens never pass through the gateway. On the control connection it
sends a heartbeat with the engine's progress counter, so that the server's watchdog works as for a child process, and
receives the command to kill the engine. A session lives as long as its control connection: when that closes, the engine
process is killed. There is one session at a time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import subprocess
from collections.abc import Mapping
from contextlib import suppress

from bankfull.handshake import (
    ACCEPTED,
    CONTROL,
    ENGINE,
    FAILED,
    IN_USE,
    NO_SESSION,
    REPLY,
    HandshakeListener,
    Wanted,
    reply,
)
from bankfull.progress import SharedProgress, watched_file
from bankfull.serve.engine.process import worker_command

log = logging.getLogger("bankfull.serve")

HEARTBEAT_SECONDS = 0.25
"""Time between two heartbeats. The end of the engine process is sent at once."""
KILL = b"K"
"""The one command of a server."""
PROBE = b"P"
"""Sent by a server that misses heartbeats, for the acknowledgement of this machine's kernel; has no other effect."""
RUNNING = 1 << 30
"""In the place of an exit status while the process runs, and before it is started."""

HEARTBEAT = struct.Struct("<qQi")
"""Process number, progress counter, exit status."""


class Gateway(HandshakeListener):
    """`environment` replaces the variables of the engine process."""

    name = "gateway"

    def __init__(self, token: bytes, environment: Mapping[str, str] | None = None) -> None:
        super().__init__(token)
        self._environment = environment
        self._session: EngineSession | None = None
        self.sessions = 0
        """Sessions so far."""

    @property
    def engine_pid(self) -> int | None:
        """The engine process that runs now."""
        return self._session.pid if self._session is not None else None

    async def serve(self, connection: socket.socket, wanted: Wanted) -> None:
        if wanted.purpose == CONTROL:
            await self._control(connection, wanted)
        elif wanted.purpose == ENGINE:
            await self._engine(connection, wanted)

    async def _control(self, connection: socket.socket, wanted: Wanted) -> None:
        if self._session is not None and self._session.leaving:
            await self._session.left.wait()
        if self._session is not None:
            await reply(connection, IN_USE)
            return
        session = self._session = EngineSession(wanted.session)
        self.sessions += 1
        try:
            await reply(connection, ACCEPTED, wanted.proof)
            await session.report(connection)
        finally:
            try:
                await session.leave()
            finally:
                self._session = None
                session.left.set()

    async def _engine(self, connection: socket.socket, wanted: Wanted) -> None:
        session = self._session
        if session is None or session.name != wanted.session or not session.vacant:
            await reply(connection, NO_SESSION)
            return
        try:
            await session.begin(connection, self._environment)
        except OSError as error:
            log.error("The engine process cannot be started: %s.", error)
            connection.setblocking(False)
            await reply(connection, FAILED)
            return
        # The engine sends nothing before its first message, which the server sends after this reply.
        connection.sendall(REPLY.pack(ACCEPTED, wanted.proof))
        connection.close()
        await session.wait()


class EngineSession:
    """The engine process of one server."""

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.leaving = False
        self.left = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._progress: SharedProgress | None = None
        self._starting = False
        self._exited: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def vacant(self) -> bool:
        """Whether the session may start its engine: once."""
        return not self._starting and not self.leaving

    @property
    def pid(self) -> int | None:
        """The process, while it runs."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def begin(self, connection: socket.socket, environment: Mapping[str, str] | None) -> None:
        """Start the engine process with this socket. Raises OSError."""
        self._starting = True
        file = watched_file()
        try:
            self._progress = SharedProgress(file)
            connection.setblocking(True)  # the mode belongs to the connection, not to the process
            shared = (connection.fileno(), file)
            self._process = await asyncio.create_subprocess_exec(
                *worker_command(*shared),
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=shared,
                env=environment,
                start_new_session=True,  # a signal to the gateway's group leaves the engine alone
            )
        finally:
            os.close(file)
        if self.leaving:
            self._kill()

    async def wait(self) -> None:
        """Until the engine process has ended."""
        if self._process is not None:
            await self._process.wait()
            if not self._exited.done():
                self._exited.set_result(None)

    async def report(self, connection: socket.socket) -> None:
        """Send heartbeats and read commands until the connection is closed."""
        loop = asyncio.get_running_loop()
        reading = loop.create_task(self._read(connection))
        try:
            while not reading.done():
                await loop.sock_sendall(connection, self._heartbeat())
                news = {reading} if self._exited.done() else {reading, self._exited}
                await asyncio.wait(news, timeout=HEARTBEAT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            reading.cancel()

    async def leave(self) -> None:
        """The server is gone. The engine has no state worth saving."""
        self.leaving = True
        self._kill()
        await self.wait()

    async def _read(self, connection: socket.socket) -> None:
        with suppress(OSError):
            while command := await asyncio.get_running_loop().sock_recv(connection, 16):
                if KILL in command:
                    self._kill()

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()

    def _heartbeat(self) -> bytes:
        process, progress = self._process, self._progress
        status = RUNNING if process is None or process.returncode is None else process.returncode
        return HEARTBEAT.pack(process.pid if process is not None else 0, progress.count if progress else 0, status)
