"""The gateway of a replica: a listener that starts an engine process for a server on another machine.

A server opens a session with a control connection and then one engine connection. The gateway passes the socket of the
second one to a fresh engine process: requests and tokens pass through the gateway only with TLS, which ends there: an
engine reads and writes its socket on two threads, and a TLS connection takes one at a time. On the control connection
it sends a heartbeat with the engine's progress counter, so that the server's watchdog works as for a child process, and
receives the command to kill the engine. A session lives as long as its control connection: when that closes, the engine
process is killed. There is one session at a time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
import struct
import subprocess
from collections.abc import Mapping
from contextlib import suppress

import msgspec

from bankfull.errors import ConfigError
from bankfull.handshake.inherited import Secrets, handed
from bankfull.handshake.link_tls import LinkTls, relay, streams
from bankfull.handshake.listener import HandshakeListener, reply
from bankfull.handshake.proof import (
    ACCEPTED,
    CONTROL,
    ENGINE,
    FAILED,
    IN_USE,
    NO_SESSION,
    NO_TLS,
    REPLY,
    TAG,
    Seal,
    SessionKeys,
    Wanted,
    derived,
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
"""What stands in the place of an exit status while the process runs, and before it is started."""

HEARTBEAT = struct.Struct("<qQi")
"""Process number, progress counter, exit status."""


EXCHANGE = b"exchange"
"""The use of a key that follows from the token: engines of the same server prove it to each other."""


class Gateway(HandshakeListener):
    """`environment` replaces the variables of the engine process. `rank_token`: of the hosts of its other ranks. `tls`:
    for both connections."""

    name = "gateway"

    def __init__(
        self,
        token: bytes,
        environment: Mapping[str, str] | None = None,
        rank_token: bytes = b"",
        tls: LinkTls | None = None,
    ) -> None:
        super().__init__(token)
        self._environment, self._tls = environment, tls
        self._secrets = Secrets(exchange=derived(token, EXCHANGE), ranks=rank_token)
        self._session: EngineSession | None = None
        self.sessions = 0
        """Sessions so far."""

    @property
    def engine_pid(self) -> int | None:
        """The engine process that runs now."""
        return self._session.pid if self._session is not None else None

    async def serve(self, connection: socket.socket, wanted: Wanted) -> None:
        try:
            context = None if self._tls is None else self._tls.answering()
        except ConfigError as error:
            log.error("%s", error)
            await reply(connection, NO_TLS)
            return
        try:
            if wanted.purpose == CONTROL:
                await self._control(connection, wanted, context)
            elif wanted.purpose == ENGINE:
                await self._engine(connection, wanted, context)
        except ssl.SSLError as error:
            log.warning("A server that knows the token was cut off, because of TLS: %s.", error)

    async def _control(self, connection: socket.socket, wanted: Wanted, context: ssl.SSLContext | None) -> None:
        if self._session is not None and self._session.leaving:
            await self._session.left.wait()
        if self._session is not None:
            await reply(connection, IN_USE)
            return
        session = self._session = EngineSession(wanted.subject)
        self.sessions += 1
        try:
            await reply(connection, ACCEPTED, wanted.proof)
            async with streams(connection, context) as (reader, writer):
                await session.report(reader, writer, wanted.keys)
        finally:
            try:
                await session.leave()
            finally:
                self._session = None
                session.left.set()

    async def _engine(self, connection: socket.socket, wanted: Wanted, context: ssl.SSLContext | None) -> None:
        session = self._session
        if session is None or session.name != wanted.subject or not session.vacant:
            await reply(connection, NO_SESSION)
            return
        told = msgspec.structs.replace(self._secrets, link=wanted.keys)
        if context is None:
            if await self._begin_engine(session, connection, connection, told):
                # The engine sends nothing before its first message, which the server sends after this reply.
                connection.sendall(REPLY.pack(ACCEPTED, wanted.proof))
                connection.close()
                await session.wait()
            return
        own, inner = socket.socketpair()
        with own:
            with inner:
                told = msgspec.structs.replace(told, host=str(connection.getsockname()[0]))
                if not await self._begin_engine(session, connection, inner, told):
                    return
            try:
                await reply(connection, ACCEPTED, wanted.proof)
                async with streams(connection, context) as outer:
                    own.setblocking(False)
                    await relay(outer, own)
            finally:
                own.close()  # the engine ends with it
                await session.wait()

    async def _begin_engine(
        self, session: EngineSession, connection: socket.socket, inner: socket.socket, secrets: Secrets
    ) -> bool:
        """`inner` becomes the engine's socket."""
        try:
            await session.begin(inner, self._environment, secrets)
        except OSError as error:
            log.error("The engine process cannot be started: %s.", error)
            connection.setblocking(False)
            await reply(connection, FAILED)
            return False
        return True


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

    async def begin(self, connection: socket.socket, environment: Mapping[str, str] | None, secrets: Secrets) -> None:
        """Start the engine process with this socket. Raises OSError."""
        self._starting = True
        file = watched_file()
        try:
            self._progress = SharedProgress(file)
            connection.setblocking(True)  # the mode belongs to the connection, not to the process
            with handed(secrets) as told:
                shared = (connection.fileno(), file, told)
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

    async def report(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keys: SessionKeys) -> None:
        """Send heartbeats and read commands until the connection is closed."""
        reading = asyncio.get_running_loop().create_task(self._read(reader, Seal(keys.of_caller)))
        seal = Seal(keys.of_listener)
        try:
            while not reading.done():
                said = self._heartbeat()
                writer.write(said + seal.tag(said))
                await writer.drain()
                news = {reading} if self._exited.done() else {reading, self._exited}
                await asyncio.wait(news, timeout=HEARTBEAT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            reading.cancel()

    async def leave(self) -> None:
        """The server is gone. The engine has no state worth saving."""
        self.leaving = True
        self._kill()
        await self.wait()

    async def _read(self, reader: asyncio.StreamReader, theirs: Seal) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                command, tag = await reader.readexactly(1), await reader.readexactly(TAG)
                if not theirs.opens(tag, command):
                    log.warning("A command is not what the server has sent; the session ends.")
                    return
                if command == KILL:
                    self._kill()

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()

    def _heartbeat(self) -> bytes:
        process, progress = self._process, self._progress
        status = RUNNING if process is None or process.returncode is None else process.returncode
        return HEARTBEAT.pack(process.pid if process is not None else 0, progress.count if progress else 0, status)
