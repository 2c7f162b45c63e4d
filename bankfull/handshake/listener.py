"""A listener that serves those who know its token, however many others connect: it holds a bounded number of
connections in their handshake (`waiting`), without a task or a thread for any of them."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from abc import ABC, abstractmethod
from contextlib import suppress

from bankfull.handshake.calling import HANDSHAKE_SECONDS, tune
from bankfull.handshake.proof import HELLO, MAC, PROOF, REPLY, WRONG_TOKEN, ListenerSide, Wanted
from bankfull.handshake.waiting import WaitingRoom, peer_of
from bankfull.tasks import OwnTasks

log = logging.getLogger("bankfull.serve")

BACKLOG = 512
"""Connections that the kernel holds until they are accepted."""
ACCEPTS = 32
"""Connections that are accepted before others are read."""
ACCEPT_PAUSE = 0.25
"""Seconds before connections are accepted again, when that has failed."""
LOG_SECONDS = 10.0
"""Seconds between two lines of the log about refused connections: whoever connects does not write the log."""


class HandshakeListener(ABC):
    """Runs on one event loop."""

    name = "listener"
    """What the log calls the listener."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._listening: socket.socket | None = None
        self._room: WaitingRoom[_Knock] = WaitingRoom()
        self._tasks = OwnTasks(self._task_failed)
        self._resume: asyncio.TimerHandle | None = None
        self._refused = 0
        """Connections refused since the last line of the log about it."""
        self._logged = float("-inf")

    @property
    def waiting(self) -> int:
        """Connections in their handshake."""
        return len(self._room)

    async def start(self, host: str, port: int = 0) -> tuple[str, int]:
        """Listen, and return the address. Raises OSError."""
        return self.begin(listening_socket(host, port))

    def begin(self, listening: socket.socket) -> tuple[str, int]:
        """Serve this socket from now on, and close it in the end."""
        self._listening = listening
        listening.setblocking(False)
        self._watch()
        address: tuple[str, int] = listening.getsockname()[:2]
        return address

    async def close(self) -> None:
        """End all connections, and listen no more."""
        if self._listening is not None:
            if self._resume is not None:
                self._resume.cancel()
            # Before it is closed, and by no cancelled future: a connection may come in the same moment.
            asyncio.get_running_loop().remove_reader(self._listening)
            self._listening.close()
            self._listening = None
        for knock in list(self._room):
            self._turn_away(knock)
        await self._tasks.end()

    @abstractmethod
    async def serve(self, connection: socket.socket, wanted: Wanted) -> None:
        """Serve a connection with a proof, which is closed afterwards. An OSError ends it in silence."""

    def _task_failed(self, error: BaseException) -> None:
        log.error("A connection of the %s has failed.", self.name, exc_info=error)

    async def _serve(self, connection: socket.socket, wanted: Wanted) -> None:
        with connection, suppress(OSError):  # includes TimeoutError
            await self.serve(connection, wanted)

    # -- connections in their handshake

    def _watch(self) -> None:
        self._resume = None
        if self._listening is not None:
            asyncio.get_running_loop().add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(ACCEPTS):
            if self._listening is None:
                return
            try:
                connection, peer = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # too many open files, most likely
                log.error("The %s cannot accept a connection: %s.", self.name, error)
                if (oldest := self._room.oldest()) is not None:
                    self._turn_away(oldest)
                loop.remove_reader(self._listening)
                self._resume = loop.call_later(ACCEPT_PAUSE, self._watch)
                return
            self._greet(connection, peer[0])

    def _greet(self, connection: socket.socket, host: str) -> None:
        knock = _Knock(connection, peer_of(host), ListenerSide(self._token))
        try:
            connection.setblocking(False)
            tune(connection)
            connection.send(knock.answerer.greeting)  # the buffer of a new connection takes it whole
        except OSError:
            connection.close()
            return
        if (gone := self._room.enter(knock)) is not None:
            self._push_out(gone)
        loop = asyncio.get_running_loop()
        knock.timer = loop.call_later(HANDSHAKE_SECONDS, self._turn_away, knock)
        loop.add_reader(connection, self._read, knock)
        self._read(knock)

    def _push_out(self, knock: _Knock) -> None:
        """Turn a connection away, unless its first packet has come in the meantime."""
        self._read(knock)
        if not knock.claims and not knock.ended:
            self._turn_away(knock)

    def _read(self, knock: _Knock) -> None:
        while not knock.ended:
            size = PROOF.size if knock.claims else HELLO.size
            try:
                part = knock.connection.recv(size - len(knock.got))  # what is behind the handshake is for others
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                part = b""
            if not part:
                self._turn_away(knock)
                return
            knock.got += part
            if len(knock.got) == size:
                message, knock.got = bytes(knock.got), bytearray()
                self._take_proof(knock, message) if knock.claims else self._take_hello(knock, message)

    def _take_hello(self, knock: _Knock, hello: bytes) -> None:
        nonce = knock.answerer.take_hello(hello)
        if not nonce:
            self._refuse(knock, WRONG_TOKEN)
            return
        knock.claims = True
        if (gone := self._room.claim(knock, nonce)) is not None:
            self._turn_away(gone)

    def _take_proof(self, knock: _Knock, proof: bytes) -> None:
        wanted = knock.answerer.take_proof(proof)
        if isinstance(wanted, bytes):
            self._refuse(knock, wanted)
            return
        self._forget(knock)
        self._tasks.begin(self._serve(knock.connection, wanted))

    def _refuse(self, knock: _Knock, outcome: bytes) -> None:
        with suppress(OSError):
            knock.connection.send(REPLY.pack(outcome, bytes(MAC)))
        self._turn_away(knock)
        self._refused += 1
        if (now := time.monotonic()) - self._logged >= LOG_SECONDS:
            log.warning(
                "The %s has refused %d connections: they have another token or version.", self.name, self._refused
            )
            self._refused, self._logged = 0, now

    def _turn_away(self, knock: _Knock) -> None:
        self._forget(knock)
        knock.connection.close()

    def _forget(self, knock: _Knock) -> None:
        """Forget a connection whose handshake is over."""
        if not knock.ended:
            knock.ended = True
            self._room.leave(knock)
            asyncio.get_running_loop().remove_reader(knock.connection)
            if knock.timer is not None:
                knock.timer.cancel()


class _Knock:
    """A connection in its handshake."""

    __slots__ = ("address", "answerer", "claims", "connection", "ended", "got", "timer")

    def __init__(self, connection: socket.socket, address: str, answerer: ListenerSide) -> None:
        self.connection, self.address, self.answerer = connection, address, answerer
        self.got = bytearray()
        self.claims = False
        """Whether it has sent an early HMAC."""
        self.ended = False
        self.timer: asyncio.TimerHandle | None = None


def listening_socket(host: str, port: int = 0) -> socket.socket:
    """Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG)


async def reply(connection: socket.socket, outcome: bytes, proof: bytes = bytes(MAC)) -> None:
    await asyncio.get_running_loop().sock_sendall(connection, REPLY.pack(outcome, proof))
