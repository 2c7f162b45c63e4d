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
from collections.abc import Mapping
from contextlib import suppress

from bankfull.handshake.inherited import Secrets, handed
from bankfull.handshake.listener import HandshakeListener, reply
from bankfull.handshake.proof import ACCEPTED, RANK, Wanted
from bankfull.parallel.reaching import meeting_key

log = logging.getLogger("bankfull.parallel")


def rank_command(*files: int) -> list[str]:
    """Starts a rank with these inherited files: its socket, and its secrets if it has any."""
    # -P: a file in the current folder must not shadow a module of the package.
    return [sys.executable, "-P", "-m", "bankfull.parallel.rank", *map(str, files)]


class RankHost(HandshakeListener):
    """Has one rank at a time. `environment` replaces the variables of the rank's process."""

    name = "host of a rank"

    def __init__(self, token: bytes, environment: Mapping[str, str] | None = None) -> None:
        super().__init__(token)
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """The rank's process, while it runs."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def close(self) -> None:
        """End the rank, and listen no more."""
        await super().close()
        await self._end()

    async def serve(self, connection: socket.socket, wanted: Wanted) -> None:
        if wanted.purpose == RANK:
            async with self._starting:
                await self._run(connection, wanted.proof)

    async def _run(self, connection: socket.socket, proof: bytes) -> None:
        """Start the process. One that runs belongs to an engine before: its replica has only one. The reply goes first,
        because the rank speaks as soon as it runs."""
        await self._end()
        await reply(connection, ACCEPTED, proof)
        connection.setblocking(True)  # the mode belongs to the connection, not to the process
        try:
            with handed(Secrets(meeting=meeting_key(self._token))) as told:
                self._process = await asyncio.create_subprocess_exec(
                    *rank_command(connection.fileno(), told),
                    stdin=subprocess.PIPE,  # whose end tells the rank that this process has ended
                    stdout=2,
                    pass_fds=[connection.fileno(), told],
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
