"""The process that controls Ray for a server: `python -m bankfull.cluster.manager FD`.

A Ray driver runs its own threads, may be ended by Ray, and unpickles the answers of replicas. None of that belongs into
the process that holds the clients' connections and keys. FD is one end of a socket pair. When the server closes the
other one, the manager ends all replicas, and Ray if it has started it.
"""

from __future__ import annotations

import select
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bankfull
from bankfull.cluster.messages import (
    AddReplicas,
    CannotAdd,
    ClusterFailed,
    ClusterUp,
    FromManager,
    RemoveReplica,
    ReplicaLost,
    ReplicaPlaced,
    StartCluster,
    line,
    to_manager,
)
from bankfull.cluster.ray_session import RaySession
from bankfull.cluster.sizes import Share, check_free, check_room, share_of
from bankfull.errors import BankfullError, ConfigError

LOOK_SECONDS = 0.5
"""Time between two looks at the replicas."""
ASK_SECONDS = 2.0
"""Time between two questions to a replica that has answered."""
PLACE_SECONDS = 120.0
"""Time in which Ray must place the replicas of the start."""


@dataclass(slots=True)
class PlacedActor:
    """A replica, as Ray knows it."""

    actor: Any
    asked: Any = None
    """The answer that is waited for."""
    asked_at: float = 0.0
    address: tuple[str, int] | None = None
    restarts: int = -1


class ClusterManager:
    def __init__(self, connection: socket.socket, start: StartCluster) -> None:
        self._connection, self._start = connection, start
        self._next = start.first
        self._replicas: dict[str, PlacedActor] = {}
        self._read = b""
        self._session = RaySession(start.address, Path(start.folder))
        self._ray = self._session.ray
        self._share = Share(1.0, 0.0)

    def begin(self) -> None:
        """Place the first replicas. Raises BankfullError: then none is left."""
        nodes = self._session.nodes()
        cpus, gpus = sum(node.cpus for node in nodes), sum(node.gpus for node in nodes)
        start = self._start
        self._share = share_of(cpus, gpus, start.most, start.cpus, start.gpus, start.device)
        self.add(start.replicas)
        deadline = time.monotonic() + PLACE_SECONDS
        while any(replica.address is None for replica in self._replicas.values()):
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"Ray has not placed {start.replicas} replicas within {PLACE_SECONDS:g} seconds: other work uses "
                    "its CPUs or GPUs; give fewer --replicas, or wait until they are free (`ray status`)."
                )
            self.look(LOOK_SECONDS, first=True)
            if self._closed():
                return
        share = self._share
        self.say(ClusterUp(share.threads, share.cpus, share.gpus, len(nodes), self._session.local))

    def add(self, count: int, now: bool = False) -> None:
        """Raises ConfigError if they do not fit, with `now` also if other work uses the resources."""
        check_room(self._session.nodes(), self._share, len(self._replicas) + count)
        if now:
            check_free(self._session.free(), self._share, count)
        from bankfull.cluster.replica import EngineReplica

        kind = self._ray.remote(EngineReplica).options(
            num_cpus=self._share.cpus, num_gpus=self._share.gpus, max_restarts=-1, scheduling_strategy="SPREAD"
        )
        host = "127.0.0.1" if self._session.local else ""
        for _ in range(count):
            name = f"replica-{self._next}"
            self._next += 1
            self._replicas[name] = PlacedActor(kind.remote(self._start.token, host))

    def look(self, seconds: float, first: bool = False) -> None:
        """Ask the replicas where they are, and report changes. `first`: a failure is an error."""
        now = time.monotonic()
        for replica in self._replicas.values():
            if replica.asked is None and (replica.address is None or now - replica.asked_at >= ASK_SECONDS):
                replica.asked, replica.asked_at = replica.actor.status.remote(), now
        asked = {replica.asked: name for name, replica in self._replicas.items() if replica.asked is not None}
        if not asked:
            return
        answered, _ = self._ray.wait(list(asked), num_returns=len(asked), timeout=seconds if first else 0)
        for answer in answered:
            name = asked[answer]
            self._replicas[name].asked = None
            try:
                status = self._ray.get(answer)
            except Exception as error:
                self._unreachable(name, error, first)
            else:
                self._answered(name, status)

    def _answered(self, name: str, status: dict[str, Any]) -> None:
        replica = self._replicas[name]
        if status["version"] != bankfull.__version__:
            raise ConfigError(
                f"The node {status['node']} has bankfull {status['version']}, this server {bankfull.__version__}: "
                "install the same version on all nodes."
            )
        address = (str(status["host"]), int(status["port"]))
        if address != replica.address:
            replica.address = address
            replica.restarts += 1
            self.say(ReplicaPlaced(name, *address, str(status["node"]), replica.restarts))

    def _unreachable(self, name: str, error: Exception, first: bool) -> None:
        """Ray restarts it, unless its code cannot run there at all."""
        text = str(error)
        if "No module named 'bankfull" in text:
            raise ConfigError(
                f"A node of the cluster has no bankfull {bankfull.__version__}: install the same version on all nodes."
            ) from error
        if first and "The actor died because of an error raised in its creation task" in text:
            raise ConfigError(f"A replica cannot be started: {text.strip().splitlines()[-1]}") from error
        if self._replicas[name].address is not None:
            self._replicas[name].address = None
            self.say(ReplicaLost(name, text.strip().splitlines()[0] if text.strip() else type(error).__name__))

    def run(self) -> None:
        """Until the server closes the connection."""
        while not self._closed():
            self._obey()
            self.look(0.0)

    def _obey(self) -> None:
        for message in self._commands():
            match message:
                case AddReplicas(count=count, first=first, now=now):
                    self._next = max(self._next, first)
                    try:
                        self.add(count, now)
                    except BankfullError as error:
                        self.say(CannotAdd(str(error)))
                case RemoveReplica(name=name):
                    if (gone := self._replicas.pop(name, None)) is not None:
                        self._ray.kill(gone.actor)

    def _commands(self) -> list[Any]:
        *whole, self._read = self._read.split(b"\n")
        return [to_manager.decode(text) for text in whole]

    def _closed(self) -> bool:
        """Wait a moment for messages; whether the server is gone."""
        ready, _, _ = select.select([self._connection], [], [], 0.0 if b"\n" in self._read else LOOK_SECONDS)
        if not ready:
            return False
        got = self._connection.recv(1 << 16)
        self._read += got
        return not got

    def say(self, message: FromManager) -> None:
        self._connection.sendall(line(message))

    def close(self) -> None:
        for replica in self._replicas.values():
            with suppress(Exception):
                self._ray.kill(replica.actor)
        self._session.close()


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the server decides
    connection = socket.socket(fileno=int(sys.argv[1]))
    first = b""
    while not first.endswith(b"\n") and (got := connection.recv(1)):
        first += got
    start = to_manager.decode(first)
    assert isinstance(start, StartCluster)
    manager = None
    try:
        manager = ClusterManager(connection, start)
        manager.begin()
        manager.run()
    except BankfullError as error:
        with suppress(OSError):
            connection.sendall(line(ClusterFailed(str(error))))
    except OSError:
        pass  # the server is gone
    finally:
        if manager is not None:
            manager.close()


if __name__ == "__main__":
    main()
