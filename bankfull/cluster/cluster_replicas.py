"""The replicas of a server on a Ray cluster: a `ReplicaSet` that grows, shrinks and follows its replicas' addresses."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any

from bankfull.cluster.managed_set import ManagedSet, PlacementOptions
from bankfull.cluster.messages import AddReplicas, RemoveReplica, ReplicaPlaced
from bankfull.cluster.rolling_update import FOREVER, RollingUpdate
from bankfull.errors import ConfigError, ModelError
from bankfull.fleet.attainment import SloMeter
from bankfull.fleet.autoscale import LOOK_SECONDS, Autoscaler, Demand
from bankfull.fleet.replica_range import MOST_REPLICAS, ReplicaRange
from bankfull.fleet.routing import RoutingPolicy, routing_policy
from bankfull.serve.replicas.local import MakeLink, SetFactory

log = logging.getLogger("bankfull.serve")

PLACE_SECONDS = 60.0
"""Time in which Ray must place a replica for an update, after it has reported free resources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions(PlacementOptions):
    replicas: ReplicaRange
    grace: float = 30.0
    """Seconds that requests may run on a replica that is removed, before they continue on another one."""
    first: int = MOST_REPLICAS
    """Replicas that must be placed at the start; the others follow when there is room."""
    slo: SloMeter | None = None
    """Counts the requests that meet the latency objectives, for autoscaling."""


def cluster_replicas(options: ClusterOptions) -> SetFactory:
    """The replicas of a server, for `run_server`."""
    policy = routing_policy(options.routing)
    return lambda make_link: ClusterReplicas(make_link, policy, options)


class ClusterReplicas(ManagedSet):
    """Any number of replicas, by request or by demand, and rolling updates of their model."""

    def __init__(self, make_link: MakeLink, policy: RoutingPolicy, options: ClusterOptions) -> None:
        super().__init__({}, policy, make_link=make_link, placement=options)
        self._options = options
        self.bounds = options.replicas
        self._expected = 0
        """Replicas that were asked for and are not placed yet."""
        self._leaving: set[str] = set()
        self._problem = ""
        """Why there are fewer replicas than wanted."""
        self._model, self._generation = options.model, 0
        """The model that new replicas load, and the number of updates before it."""
        self._assigned: dict[str, tuple[str, int]] = {}
        """Model and generation of each replica."""
        self._update: RollingUpdate | None = None
        self._updating: asyncio.Task[None] | None = None
        self._emptied: set[str] = set()
        """Replicas without an engine, in which the update starts another one."""
        self._placing: asyncio.Future[str] | None = None
        """The name of a replica that the update has asked for."""
        self._autoscaler = Autoscaler()
        self._decision = ""
        """The last decision about the number of replicas, with its reason."""

    async def start(self) -> None:
        await super().start()
        self._tasks.begin(self._keep_size())

    # -- the manager

    def _expect(self) -> ReplicaRange:
        least = self.bounds.least
        self._expected = least if self.up is not None else min(least, self._options.first)
        return ReplicaRange(self._expected, self.bounds.most)

    async def _take_placed(self, placed: ReplicaPlaced) -> None:
        known = placed.name in self._placed
        self._placed[placed.name] = placed
        if not known:
            self._expected = max(0, self._expected - 1)
        if not known and self._placing is not None and not self._placing.done():
            self._placing.set_result(placed.name)  # the update starts its engine
        elif self.up is not None and placed.name not in self._emptied:
            await self._connect(placed.name)

    def _take_refusal(self, why: str) -> None:
        self._expected = 0
        if self._placing is not None and not self._placing.done():
            self._placing.set_exception(ConfigError(why))
            return
        self.bounds = ReplicaRange(min(self.bounds.least, self.size), self.size)
        self._problem = why
        log.error("No replica is added: %s", why)

    async def _drop_engines(self) -> None:
        if self._updating is not None:
            self._updating.cancel()
        await asyncio.gather(*(self.remove(name, 0.0) for name in list(self._placed) if name not in self._leaving))
        self._assigned.clear()
        self._emptied.clear()

    async def _connect(self, name: str) -> None:
        links = {view.name: view for view in self.views()}
        if name in links:
            if links[name].state != "failed":
                self._replicas[name].link.try_again()
                return
            await self.remove(name, 0.0)
        assert self.up is not None
        model, generation = self._assigned.setdefault(name, (self._model, self._generation))
        link = self._make_link(open_engine=self._opener(name), threads=self.up.threads, model=model)
        await self.add(name, link, generation)

    # -- update

    @property
    def _updates(self) -> bool:
        return self._update is not None and self._update.state == "running"

    def _refuse_during_update(self) -> None:
        if self._updates:
            raise ConfigError("The replicas are being updated: wait until `bankfull cluster status` shows its end.")

    def update(self, model: str | None, grace: float | None) -> None:
        """Begin to replace all replicas, one at a time, by ones with other weights. `grace`: seconds that requests of
        the last old replica have; None: as long as they take."""
        self._refuse_during_update()
        if self.up is None or self._expected or self._leaving or not self._placed:
            raise ConfigError("Replicas are starting or ending: try again when `bankfull cluster status` lists none.")
        self._update = RollingUpdate(
            self,
            list(self._placed),
            (self._model, self._generation),
            model or self._model,
            grace=self._options.grace if grace is None else min(grace, self._options.grace),
            last_grace=grace,
            check=self.check_model,
        )
        self._updating = self._tasks.begin(self._update.run())

    async def place(self, seconds: float) -> str:
        ends = asyncio.get_running_loop().time() + seconds
        while True:
            name = f"replica-{self._next}"
            self._placing = asyncio.get_running_loop().create_future()
            try:
                self._ask_for(1, now=True)
                return await asyncio.wait_for(self._placing, PLACE_SECONDS)
            except TimeoutError:
                self._expected = 0
                self._forget(name)
                raise ConfigError(f"Ray has not placed {name} within {PLACE_SECONDS:g} seconds.") from None
            except ConfigError:
                if asyncio.get_running_loop().time() >= ends:
                    raise
            finally:
                self._placing = None
            await asyncio.sleep(1.0)

    async def load_weights(self, name: str, model: str, generation: int) -> None:
        self._assigned[name] = (model, generation)
        self._emptied.discard(name)
        await self._connect(name)
        while True:
            view = next((view for view in self.views() if view.name == name), None)
            if view is None or view.state in ("failed", "refused"):
                why = "It has ended." if view is None else view.problem
                await self.empty(name, 0.0)
                raise ModelError(f"{name} cannot serve {model}: {why}")
            if view.state == "ready":
                return
            await self.wait_change(LOOK_SECONDS)

    async def empty(self, name: str, grace: float) -> None:
        self._emptied.add(name)
        if any(view.name == name for view in self.views()):
            await self.remove(name, grace)

    async def discard(self, name: str) -> None:
        await self.empty(name, 0.0)
        self._emptied.discard(name)
        self._forget(name)

    def adopt(self, model: str, generation: int) -> None:
        self._model, self._generation = model, generation

    # -- size

    @property
    def size(self) -> int:
        """Replicas that run or were asked for, without those that leave."""
        return len(self._placed) - len(self._leaving) + self._expected

    def resize(self, bounds: ReplicaRange) -> None:
        """Have this many replicas from now on."""
        self._refuse_during_update()
        self.bounds, self._problem = bounds, ""

    def retire(self, name: str) -> None:
        """Move the work of a replica to the others, end it, and have one less from now on."""
        self._refuse_during_update()
        if name not in self._placed or name in self._leaving:
            there = ", ".join(n for n in self._placed if n not in self._leaving) or "none"
            raise ConfigError(f"There is no replica {name[:80]!r} that could be drained; there are {there}.")
        if self.size == 1:
            raise ConfigError(f"{name} is the only replica: add another one with `bankfull cluster scale 2` first.")
        left = self.size - 1
        self.bounds = ReplicaRange(min(self.bounds.least, left), max(left, self.bounds.most - 1))
        self._leave(name)

    def shrink(self) -> None:
        """Replicas end as their requests end; one stays for calls on connections that are still open."""
        if self._updating is not None:
            self._updating.cancel()
        super().shrink()
        self.bounds = ReplicaRange(1, 1)
        staying = [name for name in self._placed if name not in self._leaving]
        for name in staying[:-1]:
            self._leave(name, FOREVER)

    def _leave(self, name: str, grace: float | None = None) -> None:
        self._leaving.add(name)
        self._tasks.begin(self._removed(name, self._options.grace if grace is None else grace))

    async def _removed(self, name: str, grace: float) -> None:
        try:
            await self.remove(name, grace)
        finally:
            self._leaving.discard(name)
            self._forget(name)

    def _forget(self, name: str) -> None:
        self._placed.pop(name, None)
        self._assigned.pop(name, None)
        if self._manager is not None:
            self._manager.send(RemoveReplica(name))

    async def _keep_size(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self.up is None or self._manager is None or not self._placed:
                continue
            demand = self._demand()
            if self._updates:
                continue
            size = self.size
            wanted = self._autoscaler.decide(self.bounds, size, demand)
            if self._autoscaler.reason:
                self._decide(size, wanted, self._autoscaler.reason)
            if wanted > self.size:
                self._ask_for(wanted - self.size)
            for _ in range(self.size - wanted):
                self._leave(self._least_busy())

    def _ask_for(self, count: int, *, now: bool = False) -> None:
        assert self._manager is not None
        self._expected += count
        self._manager.send(AddReplicas(count, self._next, now))

    def _decide(self, size: int, wanted: int, why: str) -> None:
        what = "added" if wanted > size else "removed" if wanted < size else "added or removed"
        number = "no replica is" if wanted == size else "a replica is" if abs(wanted - size) == 1 else "replicas are"
        change = "" if wanted == size else f" ({size} before, {wanted} now)"
        sentence = f"{number} {what}{change}, because {why}."
        self._decision = f"{time.strftime('%H:%M:%S')} {sentence}"
        log.info("%s%s", sentence[0].upper(), sentence[1:])

    def _demand(self) -> Demand:
        views = self.views()
        # Online requests overtake batch work, so that the sequences at the end of a queue are those of batches.
        loads = [(view.load, view.batch) for view in views if view.load is not None]
        waiting = sum(max(0, load.waiting - batch) for load, batch in loads)
        online = sum(max(0, load.running + load.waiting - batch) for load, batch in loads)
        slo = self._options.slo
        judged, missed = (0, 0) if slo is None else slo.take()
        return Demand(
            running=online - waiting,
            waiting=waiting,
            rows=sum(view.rows for view in views),
            settled=not self._expected and not self._leaving and all(view.state == "ready" for view in views),
            judged=judged,
            missed=missed,
        )

    def _least_busy(self) -> str:
        """The newest of the replicas with the least work; one without an engine before all others."""
        work = {
            view.name: (view.state == "ready", view.load.running + view.load.waiting if view.load is not None else 0)
            for view in self.views()
        }
        names = [name for name in self._placed if name not in self._leaving]
        return min(reversed(names), key=lambda name: work.get(name, (False, 0)))

    def status(self) -> dict[str, Any]:
        return {
            **super().status(),
            "wanted": str(self.bounds),
            "starting": self._expected,
            "problem": self._problem,
            "decision": self._decision,
            "model": self._model,
            "update": None if self._update is None else self._update.status(),
            "slo": "" if self._options.slo is None else str(self._options.slo.slo),
        }
