"""Rank 0's request for places on a Ray cluster, and the process that has them: `bankfull.cluster.rank_places`.

A Ray driver runs its own threads, may be ended by Ray, and unpickles the answers of actors, so it has a process of its
own. The ranks end with it, and it ends with rank 0.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import weakref
from contextlib import suppress

import msgspec

from bankfull.errors import ConfigError, RankLost
from bankfull.parallel.reaching import RankHosts
from bankfull.ranks.mesh import MeshSpec

ANSWER_SECONDS = 300.0
"""Time in which the places must be there: longer than the process itself waits for each part."""
ENDING = 20.0
"""Seconds in which the process gives the places back; then it is killed."""
MOST_BYTES = 1 << 20


class PlacesWanted(msgspec.Struct):
    """The first message, a line of JSON."""

    address: str
    """Address of the Ray cluster to join."""
    layout: str
    ranks: int
    """Number of all ranks, with rank 0, which runs here."""
    token: str
    """The secret of the ranks' hosts, in hexadecimal digits."""


class PlacesFound(msgspec.Struct):
    """The answer."""

    hosts: list[tuple[str, int]] = []
    """Where the hosts of the other ranks listen."""
    threads: int = 1
    """Threads of each rank."""
    problem: str = ""
    """Why there are no places: one sentence."""


class RayPlaces:
    """Places of the ranks of a layout but rank 0, until `close`."""

    def __init__(self, address: str, mesh: MeshSpec) -> None:
        """Raises ConfigError where the cluster cannot be joined or has no room."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-m", "bankfull.cluster.rank_places", str(theirs.fileno())]
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for rank 0
            )
        self.close = weakref.finalize(self, _end, process, ours)
        try:
            places = _ask(ours, PlacesWanted(address, str(mesh), mesh.ranks, secrets.token_hex(32)))
        except BaseException:
            self.close()
            raise
        self.hosts, self.threads = places


def _ask(connection: socket.socket, wanted: PlacesWanted) -> tuple[RankHosts, int]:
    connection.settimeout(ANSWER_SECONDS)
    try:
        connection.sendall(msgspec.json.encode(wanted) + b"\n")
        with connection.makefile("rb") as lines:
            text = lines.readline(MOST_BYTES)
    except OSError as error:
        raise RankLost(f"the process that places ranks on Ray does not answer ({error}).") from error
    if not text:
        raise RankLost("the process that places ranks on Ray has ended; its output is above.")
    answer = msgspec.json.decode(text, type=PlacesFound)
    if answer.problem:
        raise ConfigError(answer.problem)
    return RankHosts(tuple(answer.hosts), bytes.fromhex(wanted.token)), answer.threads


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(ENDING)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
