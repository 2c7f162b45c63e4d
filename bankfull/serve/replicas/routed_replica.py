"""One replica of a set, as the front knows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from bankfull.fleet.meter import ReplicaMeter
from bankfull.fleet.prefixes import HeldPrefixes, PrefixIndex
from bankfull.fleet.table import ReplicaTable
from bankfull.serve.engine.backend import Backend
from bankfull.serve.engine.wire import Facts, Load, PrefixChanges
from bankfull.serve.replicas.resume import EngineStream
from bankfull.serve.replicas.view import ReplicaView
from bankfull.submit import Submit


class ReplicaLink(Backend, Protocol):
    """One engine and its supervision: `Link`, or a test's own."""

    phase: str
    failure: str | None
    on_change: Callable[[], None] | None
    on_prefixes: Callable[[PrefixChanges], None] | None

    def generate(self, submit: Submit) -> EngineStream: ...

    async def start(self) -> None: ...

    def try_again(self) -> None: ...

    async def drain(self, grace: float) -> None: ...

    async def close(self) -> None: ...


class RoutedReplica:
    """One engine, what the front knows about it, and what it has counted."""

    def __init__(
        self, name: str, link: ReplicaLink, table: ReplicaTable, index: PrefixIndex, generation: int = 0
    ) -> None:
        self.name, self.link, self.generation = name, link, generation
        self.meter = ReplicaMeter()
        self.slot = table.add(self.meter)
        self._index = index
        self.held: HeldPrefixes | None = None
        self.refusal = ""
        """Why its engine does not fit to the others."""
        self.leaving = False
        self.resumed = 0
        self.seen: Load | None = None
        """The load that was last added up."""
        link.on_prefixes = self._apply

    @property
    def ready(self) -> bool:
        return self.link.ready and not self.leaving and not self.refusal

    @property
    def weights(self) -> str:
        """The fingerprint of its weights, also while its engine is started again."""
        return self.link.facts.weights if self.link.facts is not None else ""

    @property
    def lost(self) -> bool:
        """Whether it will never take a request again."""
        return self.leaving or bool(self.refusal) or self.link.failure is not None

    @property
    def state(self) -> str:
        if self.link.failure is not None:
            return "failed"
        if self.leaving:
            return "draining"
        if self.refusal:
            return "refused"
        if self.link.ready:
            return "ready"
        return "loading" if self.link.facts is None else "restarting"

    def begin(self, facts: Facts) -> None:
        self.meter.started(facts)
        self.held = self._index.enter(self.slot, facts)

    def lose(self) -> None:
        self.meter.lost()
        self._index.leave(self.slot)
        self.held = None

    def _apply(self, changes: PrefixChanges) -> None:
        if self.held is not None:
            self.held.apply(changes)

    def view(self) -> ReplicaView:
        link, load = self.link, self.link.load
        queries = load.prefix_queries if load is not None else 0
        return ReplicaView(
            name=self.name,
            state=self.state,
            problem=link.failure or self.refusal,
            device=link.facts.device if link.facts is not None else "",
            weights=self.weights,
            rows=link.facts.rows if link.facts is not None else 0,
            requests=self.meter.requests,
            batch=self.meter.batch_samples,
            load=load,
            prefix_keys=0 if self.held is None else len(self.held),
            hit_rate=load.prefix_hits / queries if load is not None and queries else None,
            restarts=link.restarts,
            failed_loads=link.failed_loads,
            resumed=self.resumed,
        )
