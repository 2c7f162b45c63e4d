"""The API's end of an engine's socket, and an engine that runs as a child process."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

import msgspec

from bankfull.handshake.proof import TAG, Seal, SessionKeys
from bankfull.progress import SharedProgress, watched_file
from bankfull.serve.engine.backend import Unavailable
from bankfull.serve.engine.stall import stalled
from bankfull.serve.engine.wire import HEADER, FromEngine, body_length, decoder

log = logging.getLogger("bankfull.serve")

MOST_UNREAD = 64 << 10
"""Bytes in the socket's write buffer: messages in it cannot be withdrawn any more."""


class EngineConnection(asyncio.Protocol, ABC):
    """Sends and receives whole messages, in their order. Subclasses start and end the engine."""

    def __init__(self, receive: Callable[[FromEngine], None]) -> None:
        self._receive = receive
        self._decode = decoder(FromEngine).decode
        self._parts: list[bytes] = []
        self._size = 0
        self._needed = HEADER
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.WriteTransport | None = None
        self._unsent: deque[tuple[int | None, bytes]] = deque()
        """Messages that wait until the engine has read the earlier ones."""
        self._paused = False
        self._own: Seal | None = None
        self._theirs: Seal | None = None

    def sealed(self, keys: SessionKeys) -> None:
        """From now on each message has a tag."""
        self._own, self._theirs = Seal(keys.of_caller), Seal(keys.of_listener)

    def send(self, message: bytes, request: int | None = None) -> None:
        """Send a message, in the order of the calls. `request`: the request that the message submits, for `withdraw`.
        Raises Unavailable."""
        if self._transport is None:
            raise Unavailable("The engine is starting; ask again in a moment.")
        if self._transport.is_closing():  # some event loops raise RuntimeError for a write
            raise Unavailable("The engine has just ended; ask again in a moment.")
        if self._paused:
            self._unsent.append((request, message))
        else:
            self._write(message)

    def _write(self, message: bytes) -> None:
        assert self._transport is not None
        self._transport.write(message if self._own is None else message + self._own.tag(message))

    def withdraw(self, request: int) -> bool:
        """Remove a submitted request that was not written yet; whether that was possible."""
        for index, (submitted, _) in enumerate(self._unsent):
            if submitted == request:
                del self._unsent[index]
                return True
        return False

    async def until_ended(self, stall_seconds: float, has_work: Callable[[], bool], steps: Callable[[], int]) -> None:
        """Returns when the process has ended. One that has work and makes no progress for `stall_seconds` is killed; 0:
        it never is."""
        if not stall_seconds:
            await self.ended
            return
        watching = asyncio.ensure_future(stalled(stall_seconds, has_work, lambda: steps() + self.progress))
        try:
            await asyncio.wait({self.ended, watching}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watching.cancel()
        if not self.ended.done():
            watching.result()  # a watchdog that has failed proves nothing about the engine
            log.error(
                "The engine process %d has work, but made no progress for %g seconds; it is killed.",
                self.pid,
                stall_seconds,
            )
            self.kill()
            await self.ended

    @abstractmethod
    async def start(self) -> None:
        """Start the engine and connect to it. Raises OSError."""

    @property
    @abstractmethod
    def progress(self) -> int:
        """A counter that grows while a step runs."""

    @property
    @abstractmethod
    def pid(self) -> int:
        """The number of the engine's process on its machine; 0 before it is known."""

    @abstractmethod
    def kill(self) -> None:
        """End the engine at once."""

    @abstractmethod
    async def finish(self, patience: float) -> str:
        """Wait for the engine, and kill it after `patience` seconds; how it ended."""

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._transport.set_write_buffer_limits(high=MOST_UNREAD)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        assert self._transport is not None
        while self._unsent and not self._paused and not self._transport.is_closing():  # writing may pause it again
            self._write(self._unsent.popleft()[1])

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        self._size += len(data)
        if self._size < self._needed:
            return
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        try:
            rest = self._deal_out(memoryview(data))
        except (ValueError, msgspec.MsgspecError):
            log.exception("Unknown message type from the engine; closing the connection.")
            self.kill()
            return
        self._parts, self._size = [rest] if rest else [], len(rest)

    def _deal_out(self, data: memoryview) -> bytes:
        """Pass on all whole messages; the rest of the data."""
        start, end, behind = 0, len(data), 0 if self._theirs is None else TAG
        while end - start >= HEADER:
            stop = start + HEADER + body_length(data[start : start + HEADER]) + behind
            if stop > end:
                self._needed = stop - start
                break
            ends = stop - behind
            if self._theirs is not None and not self._theirs.opens(data[ends:stop], data[start:ends]):
                raise ValueError("a message is not what the engine has sent")
            self._receive(self._decode(data[start + HEADER : ends]))
            start = stop
        else:
            self._needed = HEADER
        return bytes(data[start:])


class EngineProcess(EngineConnection):
    """A child process, connected by a private pair of sockets."""

    def __init__(self, receive: Callable[[FromEngine], None], files: Sequence[int] = ()) -> None:
        """`files`: open files that the engine inherits, under the same numbers."""
        super().__init__(receive)
        self._files = files
        self._process: subprocess.Popen[bytes] | None = None
        self._progress: SharedProgress | None = None

    async def start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            file = watched_file()
            try:
                self._progress = SharedProgress(file)
                shared = [theirs.fileno(), file]
                self._process = subprocess.Popen(
                    worker_command(*shared),
                    stdin=subprocess.DEVNULL,
                    stdout=2,
                    close_fds=True,
                    pass_fds=[*shared, *self._files],
                )
            finally:
                os.close(file)
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=ours)

    @property
    def progress(self) -> int:
        return self._progress.count if self._progress is not None else 0

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    async def finish(self, patience: float) -> str:
        if self._transport is not None:
            self._transport.close()
        if self._process is None:
            return "before it began"
        try:
            status = await asyncio.to_thread(self._process.wait, patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = await asyncio.to_thread(self._process.wait)
        return how_ended(status)


def worker_command(*files: int) -> list[str]:
    """Starts the engine with these inherited files: its socket, where it writes its progress, and its secrets if it has
    any."""
    # -P: a file in the current folder must not shadow a module of the package.
    return [sys.executable, "-P", "-m", "bankfull.serve.engine.worker", *map(str, files)]


def how_ended(status: int) -> str:
    return f"by signal {-status}" if status < 0 else f"with status {status}"


EngineFactory = Callable[[Callable[[FromEngine], None]], EngineConnection]
"""Makes an engine, not started yet, that passes its messages to the given function."""
