"""Prefill and decode apart on a Ray cluster: a `SeparateSet` whose engines run behind the gateways of replicas. Pages
go from engine to engine over TCP. The pools have a fixed size.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

from bankfull.cluster.managed_set import ManagedSet, PlacementOptions
from bankfull.cluster.messages import ReplicaPlaced
from bankfull.errors import ConfigError
from bankfull.fleet.replica_range import ReplicaRange
from bankfull.fleet.routing import RoutingPolicy, routing_policy
from bankfull.serve.engine.wire import ExchangeEnds
from bankfull.serve.replicas.local import MakeLink, Separation, SetFactory
from bankfull.serve.replicas.separate_set import SeparateSet

log = logging.getLogger("bankfull.serve")

FIXED = "The pools of --separate have a fixed size and one model: start the server again with other options."


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOptions(PlacementOptions):
    pools: Separation


def cluster_pools(options: PoolOptions) -> SetFactory:
    """The engines of a server, for `run_server`."""
    if options.pools.link == "memory":
        raise ConfigError(
            "--separate link=memory needs engines on one machine, and --ray places them on several: leave out one."
        )
    policy = routing_policy(options.routing)
    return lambda make_link: ClusterPools(make_link, policy, options)


class ClusterPools(ManagedSet, SeparateSet):
    """Each replica that Ray has placed becomes a member of a pool, in their order."""

    engines = "engines"

    def __init__(self, make_link: MakeLink, policy: RoutingPolicy, options: PoolOptions) -> None:
        super().__init__({}, {}, policy, make_link=make_link, placement=options)
        self._pools = pools = options.pools
        self._members: dict[str, int | None] = {
            **{f"prefill-{i}": None for i in range(pools.prefill)},
            **{f"decode-{i}": i for i in range(pools.decode)},
        }
        """Engines by name; the number of the exchange of those that decode."""
        self._member_of: dict[str, str] = {}
        """Names of engines by the names of their replicas."""

    def _expect(self) -> ReplicaRange:
        return ReplicaRange(len(self._members), len(self._members))

    def _name_of(self, replica: str) -> str:
        return self._member_of.get(replica, replica)

    async def _take_placed(self, placed: ReplicaPlaced) -> None:
        if (member := self._member_of.get(placed.name)) is None:
            taken = set(self._member_of.values())
            member = next(name for name in self._members if name not in taken)
            self._member_of[placed.name] = member
        self._placed[member] = placed
        if self.up is not None:
            await self._connect(member)

    def _take_refusal(self, why: str) -> None:
        log.error("An engine has no place: %s", why)

    async def _drop_engines(self) -> None:
        await asyncio.gather(*(self.leave(name) for name in list(self._links)))
        self._member_of.clear()

    async def _connect(self, member: str) -> None:
        if (known := self._links.get(member)) is not None:
            if known.failure is None:
                known.try_again()
                return
            await self.leave(member)
        assert self.up is not None
        number = self._members[member]
        ends = ExchangeEnds([], self._pools.exchange, number, self._pools.decode, tls=self._placement.tls)
        link = self._make_link(open_engine=self._opener(member), threads=self.up.threads, exchange=ends)
        await self.join(member, link, number)

    # -- `bankfull cluster`

    def resize(self, bounds: ReplicaRange) -> None:
        raise ConfigError(FIXED)

    def retire(self, name: str) -> None:
        raise ConfigError(FIXED)

    def update(self, model: str | None, grace: float | None) -> None:
        raise ConfigError(FIXED)

    def status(self) -> dict[str, Any]:
        wanted = len(self._members)
        return {**super().status(), "wanted": str(wanted), "starting": wanted - len(self._placed)}
