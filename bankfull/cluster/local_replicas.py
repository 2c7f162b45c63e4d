"""Replicas that are processes of this machine, without Ray: `bankfull cluster` shows them and changes their number."""

from __future__ import annotations

import logging
from itertools import count
from pathlib import Path
from typing import Any

from bankfull.cluster.commanded_set import CommandedSet, shown_replica
from bankfull.config import CPU_SHARE
from bankfull.errors import ConfigError
from bankfull.fleet.replica_range import ReplicaRange
from bankfull.fleet.routing import DEFAULT_POLICY, RoutingPolicy, routing_policy
from bankfull.serve.engine.link import Link
from bankfull.serve.replicas.local import MOST_LOCAL, MakeLink, SetFactory, threads_of

log = logging.getLogger("bankfull.serve")

NVIDIA = Path("/proc/driver/nvidia")
"""There if the machine has a GPU that the engines would use."""
ASK_FOR_RAY = "add --ray HOST:PORT, or --ray local for a Ray cluster of this machine alone"


def local_replicas(
    wanted: ReplicaRange, routing: str = DEFAULT_POLICY, *, model: str = "", grace: float = 30.0
) -> SetFactory:
    """Engine processes on this machine, which share its cores evenly, unless the option `threads` is set; each has its
    own KV cache, so the option `memory` is that of one. `grace`: seconds that requests may run on a replica that is
    removed, before they continue on another one."""
    _check(wanted, "--replicas")
    policy = routing_policy(routing)
    return lambda make_link: LocalReplicas(make_link, wanted.most, policy, routing, model=model, grace=grace)


def memory_of(number: int, device: str) -> str:
    """The option `memory` of each of `number` engines, where none is given: even parts of what one would take."""
    if device != "cpu" and NVIDIA.exists():
        raise ConfigError(
            f"{number} replicas share the memory of this machine's GPUs: give the part of each with --memory, or "
            "--ray local, which gives each replica GPUs of its own."
        )
    return f"{100 * CPU_SHARE / number:.4g}%"


def _check(wanted: ReplicaRange, option: str) -> None:
    if wanted.scales:
        raise ConfigError(
            f"{option} {wanted}: a number that changes with demand needs Ray; {ASK_FOR_RAY}, or give one number."
        )
    if not 1 <= wanted.most <= MOST_LOCAL:
        raise ConfigError(f"{wanted} replicas cannot run on this machine: give 1 to {MOST_LOCAL}.")


class LocalReplicas(CommandedSet):
    """Each engine is supervised by its link: one that ends is started again, and its streams go on elsewhere."""

    def __init__(
        self, make_link: MakeLink, number: int, policy: RoutingPolicy, routing: str, *, model: str, grace: float
    ) -> None:
        """`routing`: the name of the policy."""
        self._make_link, self._model, self._routing, self._grace = make_link, model, routing, grace
        self._names = (f"replica-{i}" for i in count(1))
        self._wanted = number
        self._leaving: set[str] = set()
        super().__init__({next(self._names): self._link(number) for _ in range(number)}, policy)

    def _link(self, number: int) -> Link:
        return self._make_link(threads=threads_of(number))

    def shrink(self) -> None:
        super().shrink()
        self._resize(1)

    # -- commands

    def resize(self, bounds: ReplicaRange) -> None:
        """Have this many replicas from now on. New ones get an even share of the cores; those that run keep theirs."""
        _check(bounds, "scale")
        self._resize(bounds.most)

    def _resize(self, wanted: int) -> None:
        self._wanted = wanted
        staying = self._staying()
        for _ in range(wanted - len(staying)):
            self._tasks.begin(self.add(next(self._names), self._link(wanted)))
        for _ in range(len(staying) - wanted):
            self._leave(self._least_busy())

    def retire(self, name: str) -> None:
        """Move the work of a replica to the others, end it, and have one less from now on."""
        staying = self._staying()
        if name not in staying:
            raise ConfigError(
                f"There is no replica {name[:80]!r} that could be drained; there are {', '.join(staying) or 'none'}."
            )
        if len(staying) == 1:
            raise ConfigError(f"{name} is the only replica: add another one with `bankfull cluster scale 2` first.")
        self._wanted = len(staying) - 1
        self._leave(name)

    def update(self, model: str | None, grace: float | None) -> None:
        raise ConfigError(
            "Replicas that are processes of this machine are not updated one by one: start a server with the new "
            f"weights and --take-over, or, when you start this one, {ASK_FOR_RAY}."
        )

    def status(self) -> dict[str, Any]:
        views = self.views()
        return {
            "replicas": [
                shown_replica(
                    view.name,
                    view,
                    state="draining" if view.name in self._leaving else view.state,
                    node="this machine",
                    address="",
                )
                for view in views
            ],
            "wanted": str(self._wanted),
            "starting": sum(view.state == "loading" for view in views),
            "problem": "",
            "refused": [view.problem for view in views if view.state in ("refused", "failed")],
            "decision": "",
            "model": self._model,
            "update": None,
            "slo": "",
            "routing": self._routing,
            "ray": None,
            "nodes": 1,
            "cpus": float(threads_of(self._wanted)),
            "gpus": 0.0,
        }

    # -- size

    def _staying(self) -> list[str]:
        return [name for name in self._replicas if name not in self._leaving]

    def _least_busy(self) -> str:
        """The newest of the replicas with the least work; one without an engine before all others."""
        work = {view.name: (view.state == "ready", view.requests) for view in self.views()}
        return min(reversed(self._staying()), key=lambda name: work[name])

    def _leave(self, name: str) -> None:
        self._leaving.add(name)
        self._tasks.begin(self._removed(name))

    async def _removed(self, name: str) -> None:
        try:
            await self.remove(name, self._grace)
        finally:
            self._leaving.discard(name)

    def _task_failed(self, error: BaseException) -> None:
        log.error("A replica could not be added or removed.", exc_info=error)
