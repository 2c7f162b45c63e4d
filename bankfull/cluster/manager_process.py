"""The server's end of its cluster manager."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress

import msgspec

from bankfull.cluster.messages import MOST_BYTES, FromManager, StartCluster, ToManager, from_manager, line
from bankfull.cluster.ray_session import folder_for_ray

ENDING = 20.0
"""Seconds in which a manager ends its replicas and Ray; then it is killed."""


class ManagerProcess:
    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._folder = folder_for_ray()

    async def start(self, wanted: StartCluster) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-m", "bankfull.cluster.manager", str(theirs.fileno())]
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the server, which ends the manager
            )
        self._reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=MOST_BYTES)
        self.send(msgspec.structs.replace(wanted, folder=str(self._folder.path)))

    def send(self, message: ToManager) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(line(message))

    async def messages(self) -> AsyncIterator[FromManager]:
        """Until the manager has closed its end."""
        assert self._reader is not None
        with suppress(ConnectionError):
            while text := await self._reader.readline():
                yield from_manager.decode(text)

    async def end(self) -> int | None:
        """Wait until replicas and Ray have ended; the manager's exit status."""
        if self._writer is not None:
            self._writer.close()
        process, status = self._process, None
        if process is not None:
            with suppress(TimeoutError):
                status = await asyncio.wait_for(process.wait(), ENDING)
            # A manager that was killed leaves processes of Ray behind: all of them are in its group.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            status = await process.wait()
        self._folder.close()
        return status
