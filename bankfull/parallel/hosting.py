"""The end of a rank on another machine: a listener that starts the rank's process on the connection of rank 0.

Rank 0 proves that it knows the token of its replica, and so does the listener (`bankfull.handshake`). The process gets
the socket, and ends with it: with rank 0, with the network between the two, or with the process of this listener.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from typing import Any

from bankfull.handshake import ACCEPTED, RANK, answer, reply, tune

log = logging.getLogger("bankfull.parallel")

MOST_UNKNOWN = 8
"""Connections in their handshake; further ones are closed at once."""
PAUSE = 0.25
"""Seconds before connections are accepted again, when that has failed."""


def rank_command(socket_number: int) -> list[str]:
    """Starts a rank with this inherited socket."""
    # -P: a file in the current folder must not shadow a module of the package.
    return [sys.executable, "-P", "-m", "bankfull.rank", str(socket_number)]


class RankHost:
    """Runs on one event loop, with one rank at a time. `environment` replaces the variables of the rank's process."""

    def __init__(self, token: bytes, environment: Mapping[str, str] | None = None) -> None:
        self._token, self._environment = token, environment
        self._listening: socket.socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
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

    @property
    def pid(self) -> int | None:
        """The rank's process, while it runs."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def close(self) -> None:
        """End the rank, and listen no more."""
        if self._listening is not None:
            self._listening.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._end()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("A connection to the host of a rank has failed.", exc_info=error)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError as error:  # too many open files, or a connection that has gone meanwhile
                log.error("The host of a rank cannot accept a connection: %s.", error)
                await asyncio.sleep(PAUSE)
                continue
            if self._unknown >= MOST_UNKNOWN:
                connection.close()
                continue
            self._unknown += 1
            self._begin(self._serve(connection))

    async def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):  # includes TimeoutError
            try:
                connection.setblocking(False)
                tune(connection)
                wanted = await answer(connection, self._token)
            finally:
                self._unknown -= 1
            if wanted is None:
                log.warning("A connection to the host of a rank was refused: it has another token or version.")
            elif wanted.purpose == RANK:
                async with self._starting:
                    await self._run(connection, wanted.proof)

    async def _run(self, connection: socket.socket, proof: bytes) -> None:
        """Start the process. One that runs belongs to an engine before: its replica has only one. The reply goes first,
        because the rank speaks as soon as it runs."""
        await self._end()
        await reply(connection, ACCEPTED, proof)
        connection.setblocking(True)  # the mode belongs to the connection, not to the process
        try:
            self._process = await asyncio.create_subprocess_exec(
                *rank_command(connection.fileno()),
                stdin=subprocess.PIPE,  # whose end tells the rank that this process has ended
                stdout=2,
                pass_fds=[connection.fileno()],
                env=self._environment,
                start_new_session=True,  # a signal to this process's group leaves the rank alone
            )
        except OSError as error:  # rank 0 finds its connection closed
            log.error("The process of a rank cannot be started: %s.", error)

    async def _end(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
