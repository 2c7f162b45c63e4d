"""The process that controls Ray for a server: `python -m bankfull.cluster.manager FD`.

A Ray driver runs its own threads, may be ended by Ray, and unpickles the answers of replicas. None of that belongs into
the process that holds the clients' connections and keys. FD is one end of a socket pair. When the server closes the
other one, the manager ends all replicas, and Ray if it has started it.
"""

from __future__ import annotations

import re
import secrets
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bankfull
from bankfull.cluster.messages import (
    AddReplicas,
    CannotAdd,
    ClusterFailed,
    ClusterUp,
    FromManager,
    RefusedNodes,
    RemoveReplica,
    ReplicaLost,
    ReplicaPlaced,
    StartCluster,
    line,
    to_manager,
)
from bankfull.cluster.ray_session import RaySession, allowed_nodes
from bankfull.cluster.sizes import Share, check_free, check_room, share_of
from bankfull.errors import BankfullError, ConfigError

LOOK_SECONDS = 0.5
"""Time between two looks at the replicas."""
ASK_SECONDS = 2.0
"""Time between two questions to a replica that has answered."""
PLACE_SECONDS = 120.0
"""Time in which Ray must place the replicas of the start."""
RETRY_SECONDS = 10.0
"""Time before a replica that could not be created is created again."""


@dataclass(slots=True)
class PlacedReplica:
    """A replica, as Ray knows it."""

    actors: list[Any]
    """The gateway, and the hosts of the other ranks; empty until they are created again."""
    group: Any = None
    """The placement group of a replica with several ranks."""
    asked: list[Any] = field(default_factory=list)
    """The answers that are waited for, one of each actor."""
    asked_at: float = 0.0
    hosts: tuple[tuple[str, int], ...] = ()
    """Where the other ranks are, as the gateway was told with the last question."""
    address: tuple[str, int] | None = None
    restarts: int = -1
    create_at: float = 0.0
    """Time at which it is created again, if there are no actors."""
    refused: bool = False
    """Whether it waits for a node with the server's version."""


class ClusterManager:
    def __init__(self, connection: socket.socket, start: StartCluster, session: RaySession) -> None:
        self._connection, self._start = connection, start
        self._next = start.first
        self._replicas: dict[str, PlacedReplica] = {}
        self._read = b""
        self._session, self._ray = session, session.ray
        self._share = Share(1.0, 0.0)
        self._refused: dict[str, str] = {}
        """Ids of the nodes that get no replica, and the reasons."""
        self._refused_at = 0.0
        """Time at which the refused nodes were last looked for."""
        self._beginning = True

    def begin(self) -> None:
        """Place the first replicas. Raises BankfullError: then none is left."""
        nodes = self._session.nodes()
        cpus, gpus = sum(node.cpus for node in nodes), sum(node.gpus for node in nodes)
        start = self._start
        self._share = share_of(cpus, gpus, start.most, start.cpus, start.gpus, start.device, start.ranks)
        self.add(start.replicas)
        deadline = time.monotonic() + PLACE_SECONDS
        while any(replica.address is None and not replica.refused for replica in self._replicas.values()):
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"Ray has not placed {start.replicas} replicas within {PLACE_SECONDS:g} seconds: other work uses "
                    "its CPUs or GPUs; give fewer (--replicas, --separate), or wait until they are free (`ray status`)."
                )
            self.look(LOOK_SECONDS)
            if self._closed():
                return
        self._beginning = False
        share = self._share
        self.say(ClusterUp(share.threads, share.cpus, share.gpus, len(nodes), self._session.local))

    def add(self, count: int, now: bool = False) -> None:
        """Raises ConfigError if they do not fit, with `now` also if other work uses the resources."""
        check_room(self._session.nodes(self._refused), self._share, len(self._replicas) + count)
        if now:
            check_free(self._session.free(self._refused), self._share, count)
        for _ in range(count):
            name = f"replica-{self._next}"
            self._next += 1
            self._replicas[name] = PlacedReplica([])
            self._create(self._replicas[name])

    def _create(self, replica: PlacedReplica) -> None:
        """Create the replica's actors, on nodes that are not refused. Several ranks have a placement group, so that a
        replica gets all of its places or none."""
        from bankfull.cluster.replica import EngineReplica, HostedRank

        share, host = self._share.of_rank, "127.0.0.1" if self._session.local else ""
        how = {"num_cpus": share.cpus, "num_gpus": share.gpus, "max_restarts": -1}
        if self._share.ranks == 1:
            selector = allowed_nodes(self._refused) if self._refused else None
            kind = self._ray.remote(EngineReplica).options(**how, scheduling_strategy="SPREAD", label_selector=selector)
            replica.actors = [kind.remote(self._start.token, host, "", self._start.tls)]
            return
        token = secrets.token_hex(32)
        replica.group, replica.hosts = self._session.reserve(self._share, self._refused), ()

        def create(kind: type, number: int, *parts: str | int) -> Any:
            place = self._session.bundle(replica.group, number)
            return self._ray.remote(kind).options(**how, scheduling_strategy=place).remote(*parts)

        replica.actors = [create(EngineReplica, 0, self._start.token, host, token, self._start.tls)]
        for number in range(1, self._share.ranks):
            replica.actors.append(create(HostedRank, number, token, host, share.threads))

    def _end(self, replica: PlacedReplica) -> None:
        for actor in replica.actors:
            self._ray.kill(actor)
        if replica.group is not None:
            self._session.release(replica.group)
        replica.actors, replica.group, replica.asked = [], None, []

    def look(self, seconds: float) -> None:
        """Ask the replicas where they are, and report changes. At the start, wait `seconds` for them; a failure is an
        error then."""
        now = time.monotonic()
        for replica in self._replicas.values():
            if not replica.actors and now >= replica.create_at:
                self._create(replica)
            if not replica.actors or replica.asked:
                continue
            if replica.address is None or now - replica.asked_at >= ASK_SECONDS:
                gateway, *others = replica.actors
                told = (replica.hosts,) if others else ()
                replica.asked = [gateway.status.remote(*told), *(other.status.remote() for other in others)]
                replica.asked_at = now
        self._look_for_refused(now)
        asked = [answer for replica in self._replicas.values() for answer in replica.asked]
        if not asked:
            return
        answered, _ = self._ray.wait(asked, num_returns=len(asked), timeout=seconds if self._beginning else 0)
        for name, replica in list(self._replicas.items()):
            if not replica.asked or not all(answer in answered for answer in replica.asked):
                continue
            answers, replica.asked = replica.asked, []
            try:
                statuses = [self._ray.get(answer) for answer in answers]
            except Exception as error:
                self._unreachable(name, error)
            else:
                self._answered(name, statuses)

    def _answered(self, name: str, statuses: list[dict[str, Any]]) -> None:
        replica = self._replicas[name]
        for status in statuses:
            if status["version"] != bankfull.__version__:
                node = status.get("node_id", "")  # older versions do not report it
                self._refuse(
                    name,
                    {node} if node else self._session.node_ids(str(status["host"])),
                    f"The node {status['node']} has bankfull {status['version']}, this server {bankfull.__version__}",
                )
                return
        status, *others = statuses
        if (hosts := in_order(str(status.get("node_id", "")), others)) != replica.hosts:
            replica.hosts, replica.asked_at = hosts, 0.0  # the gateway must know them first
            return
        address = (str(status["host"]), int(status["port"]))
        replica.refused = False
        if address != replica.address:
            replica.address = address
            replica.restarts += 1
            self.say(ReplicaPlaced(name, *address, str(status["node"]), replica.restarts))

    def _unreachable(self, name: str, error: Exception) -> None:
        """Ray restarts it, unless its code cannot run there at all."""
        text = str(error)
        if "No module named 'bankfull" in text:
            match = re.search(r"\bip=([^\s,)]+)", text)
            host = "" if match is None else match[1]
            which = f"The node {host}" if host else "A node of the cluster"
            nodes = self._session.node_ids(host) if host else set()
            self._refuse(name, nodes, f"{which} has no bankfull {bankfull.__version__}")
            return
        uncreated = "The actor died because of an error raised in its creation task" in text
        if uncreated and self._beginning:
            raise ConfigError(f"A replica cannot be started: {text.strip().splitlines()[-1]}") from error
        replica = self._replicas[name]
        if replica.address is not None or (uncreated and replica.actors):
            replica.address = None
            self.say(ReplicaLost(name, text.strip().splitlines()[0] if text.strip() else type(error).__name__))
        if uncreated:  # Ray does not restart such an actor
            self._end(replica)
            replica.create_at = time.monotonic() + RETRY_SECONDS

    def _refuse(self, name: str, nodes: set[str], why: str) -> None:
        """The code of a replica differs on its node. It is created again on another one, or ends if it was to be added
        and there is no other one. At the first start of the server this is an error."""
        remedy = "install the same version on all nodes"
        if self._beginning and not self._start.again:
            raise ConfigError(f"{why}: {remedy}.")
        sentence = f"{why}: {remedy} and start Ray there again; it gets no replica until then."
        replica = self._replicas[name]
        self._end(replica)
        replica.address, replica.refused = None, True
        replica.create_at = 0.0 if nodes else time.monotonic() + RETRY_SECONDS
        if nodes:
            self._refused |= dict.fromkeys(nodes, sentence)
            self.say(RefusedNodes(self._refused))
        else:  # it cannot be avoided
            self.say(ReplicaLost(name, sentence))
        if replica.restarts < 0 and not self._beginning:
            try:
                check_room(self._session.nodes(self._refused), self._share, len(self._replicas))
            except ConfigError:
                del self._replicas[name]
                self.say(CannotAdd(sentence))

    def _look_for_refused(self, now: float) -> None:
        """A node that has left may come back with another version, and with another id."""
        if self._refused and now - self._refused_at >= ASK_SECONDS:
            self._refused_at = now
            if gone := self._refused.keys() - self._session.node_ids():
                self._refused = {node: why for node, why in self._refused.items() if node not in gone}
                self.say(RefusedNodes(self._refused))

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
                        self._end(gone)

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
                self._end(replica)
        self._session.close()


def in_order(first: str, others: list[dict[str, Any]]) -> tuple[tuple[str, int], ...]:
    """The addresses of the ranks after rank 0, whose machine has the id `first`. Those of one machine are neighbours,
    and those of rank 0's machine come first: tensor ranks, which are neighbours, exchange more than stages do."""
    nodes = sorted(others, key=lambda one: (one["node_id"] != first, one["node_id"]))
    return tuple((str(one["host"]), int(one["port"])) for one in nodes)


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
        manager = ClusterManager(connection, start, RaySession(start.address, Path(start.folder)))
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
