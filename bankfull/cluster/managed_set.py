"""A `ReplicaSet` whose engines run on Ray, behind the gateways of replicas. It starts the cluster manager, which places
the replicas, ends it, and starts it again when it has died.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from bankfull.cluster.commanded_set import CommandedSet, shown_replica
from bankfull.cluster.manager_process import ManagerProcess
from bankfull.cluster.messages import (
    CannotAdd,
    ClusterFailed,
    ClusterUp,
    FromManager,
    RefusedNodes,
    ReplicaLost,
    ReplicaPlaced,
    StartCluster,
)
from bankfull.errors import ConfigError
from bankfull.fleet.replica_range import ReplicaRange
from bankfull.fleet.routing import DEFAULT_POLICY
from bankfull.handshake.link_tls import LinkTls
from bankfull.serve.engine.process import EngineConnection
from bankfull.serve.engine.remote import RemoteEngine
from bankfull.serve.engine.wire import FromEngine
from bankfull.serve.replicas.local import SECRET_BYTES, MakeLink

log = logging.getLogger("bankfull.serve")

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Back-off in seconds before the cluster is started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementOptions:
    """What the user has asked for of every replica."""

    model: str
    routing: str = DEFAULT_POLICY
    ray: str | None = None
    """Address of the Ray cluster to join; None: start one on this machine."""
    cpus: float | None = None
    gpus: float | None = None
    device: str = "auto"
    ranks: int = 1
    """Ranks of each replica, by its layout."""
    tls: str = ""
    """The folder of `handshake.link_tls.LinkTls`; empty: without TLS."""


class ManagedSet(CommandedSet):
    """Runs on the server's event loop. The manager process controls Ray; each engine has a link of its own, which
    connects to a replica's gateway and is supervised as usual. `bankfull cluster` reaches the set through a socket."""

    engines: ClassVar = "replicas"
    """What the user calls them."""

    def __init__(self, *pools_and_policy: Any, make_link: MakeLink, placement: PlacementOptions) -> None:
        """`pools_and_policy`: what the set of the other base class takes. Its pools are empty."""
        super().__init__(*pools_and_policy)
        self._make_link, self._placement = make_link, placement
        self.up: ClusterUp | None = None
        self._token = secrets.token_bytes(SECRET_BYTES)
        """What gateways ask for."""
        self._placed: dict[str, ReplicaPlaced] = {}
        """Where each engine was last seen."""
        self._next = 1
        """The number of the next replica, in its name."""
        self._refused: dict[str, str] = {}
        """Nodes that get no engine, and the reasons."""
        self._failure = ""
        self._manager: ManagerProcess | None = None

    # -- what the sets differ in

    @abstractmethod
    def _expect(self) -> ReplicaRange:
        """A manager is started: the number of replicas that it places before the engines start, and the largest one."""

    @abstractmethod
    async def _take_placed(self, placed: ReplicaPlaced) -> None:
        """A replica's gateway listens, for the first time or again."""

    @abstractmethod
    async def _connect(self, name: str) -> None:
        """Open a link, or open it again if it was given up. A link that lives finds the new address by itself."""

    @abstractmethod
    def _take_refusal(self, why: str) -> None:
        """The cluster has no room for one more replica."""

    @abstractmethod
    async def _drop_engines(self) -> None:
        """Close the links to the engines and forget their names: their replicas have ended with the manager."""

    def _name_of(self, replica: str) -> str:
        """The engine of a replica."""
        return replica

    # -- life

    async def start(self) -> None:
        await super().start()
        self._tasks.begin(self._supervise())

    async def _end_places(self) -> None:
        """End the replicas, and Ray if it was started for them."""
        if self._manager is not None:
            await self._manager.end()

    @property
    def says(self) -> str:
        return super().says if self._placed else f"The {self.engines} are starting; ask again in a moment."

    def _raise_failure(self) -> None:
        if self._failure:
            raise ConfigError(self._failure)
        super()._raise_failure()

    def _task_failed(self, error: BaseException) -> None:
        log.error("The control of the cluster has failed.", exc_info=error)
        self._fail(f"The control of the cluster has failed: {error!r}.")

    def _fail(self, why: str) -> None:
        self._failure = why
        self._notify()

    # -- the manager

    async def _supervise(self) -> None:
        pause = FIRST_PAUSE
        while True:
            self._manager = manager = ManagerProcess()
            await manager.start(self._order())
            why = ""
            async for message in manager.messages():
                if isinstance(message, ClusterFailed):
                    why = message.why
                else:
                    await self._take(message)
            status = await manager.end()
            why = why or f"The cluster manager has ended with status {status}; its output is above."
            if self.up is None:
                self._fail(why)
                return
            log.error("%s The %s are started again in %g seconds.", why, self.engines, pause)
            await self._drop_engines()
            self._placed.clear()
            self._refused.clear()
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _order(self) -> StartCluster:
        wanted, placement = self._expect(), self._placement
        return StartCluster(
            replicas=wanted.least,
            most=wanted.most,
            token=self._token.hex(),
            folder="",
            address=placement.ray,
            cpus=placement.cpus,
            gpus=placement.gpus,
            ranks=placement.ranks,
            device=placement.device,
            tls=placement.tls,
            first=self._next,
            again=self.up is not None,
        )

    async def _take(self, message: FromManager) -> None:
        match message:
            case ReplicaPlaced():
                self._next = max(self._next, int(message.name.rpartition("-")[2]) + 1)
                await self._take_placed(message)
            case ClusterUp():
                self.up = message
                for name in list(self._placed):
                    await self._connect(name)
            case ReplicaLost():
                log.error("%s does not answer: %s", self._name_of(message.name), message.why)
            case RefusedNodes():
                for node in message.nodes.keys() - self._refused.keys():
                    log.error("%s", message.nodes[node])
                self._refused = message.nodes
            case CannotAdd():
                self._take_refusal(message.why)

    def _opener(self, name: str) -> Callable[[Callable[[FromEngine], None]], EngineConnection]:
        def open_engine(receive: Callable[[FromEngine], None]) -> EngineConnection:
            placed = self._placed[name]
            return RemoteEngine(receive, (placed.host, placed.port), self._token, LinkTls.of(self._placement.tls))

        return open_engine

    def status(self) -> dict[str, Any]:
        """What `bankfull cluster status` shows; a set adds the numbers of its engines."""
        up, placement, by_name = self.up, self._placement, {view.name: view for view in self.views()}
        return {
            "replicas": [
                shown_replica(
                    name,
                    view := by_name.get(name),
                    state="starting" if view is None else view.state,
                    node=where.node,
                    address=f"{where.host}:{where.port}",
                    restarts=where.restarts,
                )
                for name, where in self._placed.items()
            ],
            "problem": "",
            "refused": list(self._refused.values()),
            "decision": "",
            "model": placement.model,
            "update": None,
            "slo": "",
            "routing": placement.routing,
            "ray": "local" if up is not None and up.local else placement.ray,
            "nodes": up.nodes if up is not None else 0,
            "cpus": up.cpus if up is not None else 0.0,
            "gpus": up.gpus if up is not None else 0.0,
        }
