"""Prefill and decode apart on a Ray cluster: a `SeparateSet` whose engines run behind the gateways of replicas. Pages
go from engine to engine over TCP. The pools have a fixed size.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from secrets import token_bytes
from typing import Any

from bankfull.cluster.admin import AdminSocket
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
from bankfull.cluster.placed_replicas import shown_replicas
from bankfull.errors import ConfigError
from bankfull.fleet.replica_range import ReplicaRange
from bankfull.fleet.routing import DEFAULT_POLICY, RoutingPolicy, routing_policy
from bankfull.serve.engine.process import EngineConnection
from bankfull.serve.engine.remote import RemoteEngine
from bankfull.serve.engine.wire import ExchangeEnds, FromEngine
from bankfull.serve.replicas.local import SECRET_BYTES, MakeLink, Separation, SetFactory
from bankfull.serve.replicas.separate_set import SeparateSet

log = logging.getLogger("bankfull.serve")

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Back-off in seconds before the cluster is started again."""
STARTING = "The engines are starting; ask again in a moment."
FIXED = "The pools of --separate have a fixed size and one model: start the server again with other options."


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """What the user has asked for."""

    pools: Separation
    model: str
    ray: str
    """Address of the Ray cluster to join."""
    routing: str = DEFAULT_POLICY
    cpus: float | None = None
    gpus: float | None = None
    device: str = "auto"


def cluster_pools(options: PoolOptions) -> SetFactory:
    """The engines of a server, for `run_server`."""
    if options.pools.link == "memory":
        raise ConfigError(
            "--separate link=memory needs engines on one machine, and --ray places them on several: leave out one."
        )
    policy = routing_policy(options.routing)
    return lambda make_link: ClusterPools(make_link, policy, options)


class ClusterPools(SeparateSet):
    """Runs on the server's event loop. Each replica that Ray has placed becomes a member of a pool, in their order."""

    def __init__(self, make_link: MakeLink, policy: RoutingPolicy, options: PoolOptions) -> None:
        super().__init__({}, {}, policy)
        self._make_link, self._options = make_link, options
        self._token, self._secret = token_bytes(SECRET_BYTES), token_bytes(SECRET_BYTES)
        """What gateways ask for, and what engines prove to each other."""
        pools = options.pools
        self._members: dict[str, int | None] = {
            **{f"prefill-{i}": None for i in range(pools.prefill)},
            **{f"decode-{i}": i for i in range(pools.decode)},
        }
        """Engines by name; the number of the exchange of those that decode."""
        self._member_of: dict[str, str] = {}
        """By the names of replicas."""
        self._placed: dict[str, ReplicaPlaced] = {}
        """Where each member was last seen."""
        self.up: ClusterUp | None = None
        self._next = 1
        self._refused: dict[str, str] = {}
        """Nodes that get no engine, and the reasons."""
        self._failure = ""
        self._manager: ManagerProcess | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._admin = AdminSocket(self)

    # -- life

    async def start(self) -> None:
        await super().start()
        try:
            await self._admin.start()
        except OSError as error:
            log.error("`bankfull cluster` cannot reach this server: %s.", error)
        self._supervisor = asyncio.get_running_loop().create_task(self._supervise())
        self._supervisor.add_done_callback(self._ended)

    async def close(self) -> None:
        """End the engines and their replicas."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            with suppress(asyncio.CancelledError, Exception):  # a failure was logged
                await self._supervisor
        try:
            await super().close()
        finally:
            if self._manager is not None:
                await self._manager.end()
            await self._admin.close()

    def shrink(self) -> None:
        self._admin.hide()

    @property
    def says(self) -> str:
        return super().says if self._placed else STARTING

    def _raise_failure(self) -> None:
        if self._failure:
            raise ConfigError(self._failure)
        super()._raise_failure()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
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
            await manager.start(self._wanted())
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
            log.error("%s The engines are started again in %g seconds.", why, pause)
            await asyncio.gather(*(self.leave(name) for name in list(self._links)))
            self._placed.clear()
            self._member_of.clear()
            self._refused.clear()
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _wanted(self) -> StartCluster:
        options = self._options
        return StartCluster(
            replicas=len(self._members),
            most=len(self._members),
            token=self._token.hex(),
            folder="",
            address=options.ray,
            cpus=options.cpus,
            gpus=options.gpus,
            device=options.device,
            first=self._next,
            again=self.up is not None,
        )

    async def _take(self, message: FromManager) -> None:
        match message:
            case ReplicaPlaced():
                self._next = max(self._next, int(message.name.rpartition("-")[2]) + 1)
                if (member := self._member_of.get(message.name)) is None:
                    taken = set(self._member_of.values())
                    member = next(name for name in self._members if name not in taken)
                    self._member_of[message.name] = member
                self._placed[member] = message
                if self.up is not None:
                    await self._connect(member)
            case ClusterUp():
                self.up = message
                for member in list(self._placed):
                    await self._connect(member)
            case ReplicaLost():
                log.error("%s does not answer: %s", self._member_of.get(message.name, message.name), message.why)
            case RefusedNodes():
                for node in message.nodes.keys() - self._refused.keys():
                    log.error("%s", message.nodes[node])
                self._refused = message.nodes
            case CannotAdd():
                log.error("An engine has no place: %s", message.why)

    async def _connect(self, member: str) -> None:
        """Open a link, or open it again if it was given up. A link that lives finds the new address by itself."""
        if (known := self._links.get(member)) is not None:
            if known.failure is None:
                known.try_again()
                return
            await self.leave(member)
        assert self.up is not None
        number = self._members[member]
        ends = ExchangeEnds([], self._options.pools.exchange, number, self._options.pools.decode, self._secret)
        link = self._make_link(open_engine=self._opener(member), threads=self.up.threads, exchange=ends)
        await self.join(member, link, number)

    def _opener(self, member: str) -> Callable[[Callable[[FromEngine], None]], EngineConnection]:
        def open_engine(receive: Callable[[FromEngine], None]) -> EngineConnection:
            placed = self._placed[member]
            return RemoteEngine(receive, (placed.host, placed.port), self._token)

        return open_engine

    # -- `bankfull cluster`

    def resize(self, bounds: ReplicaRange) -> None:
        raise ConfigError(FIXED)

    def retire(self, name: str) -> None:
        raise ConfigError(FIXED)

    def update(self, model: str | None, grace: float | None) -> None:
        raise ConfigError(FIXED)

    def status(self) -> dict[str, Any]:
        up = self.up
        return {
            "replicas": shown_replicas(self._placed, self.views()),
            "wanted": str(len(self._members)),
            "starting": len(self._members) - len(self._placed),
            "problem": "",
            "refused": list(self._refused.values()),
            "decision": "",
            "model": self._options.model,
            "update": None,
            "slo": "",
            "routing": self._options.routing,
            "ray": self._options.ray,
            "nodes": up.nodes if up is not None else 0,
            "cpus": up.cpus if up is not None else 0.0,
            "gpus": up.gpus if up is not None else 0.0,
        }
