"""The front of a simulated fleet: the server's own table, prefix index, meters and routing policy, with the knowledge
that replicas have reported so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bankfull.engine import Engine
from bankfull.fleet.meter import ReplicaMeter
from bankfull.fleet.prefixes import PrefixIndex, PromptKeys
from bankfull.fleet.reports import Facts, Load, PrefixChanges, queue_figures, routing_figures
from bankfull.fleet.routing import routing_policy
from bankfull.fleet.table import ReplicaTable
from bankfull.state.mask import extent_of
from bankfull.state.prefix import Chain
from bankfull.state.spec import Layout
from bankfull.types import Output


@dataclass(slots=True)
class FleetStep:
    """One step of a replica's engine. A step without a load is not reported to the front."""

    outputs: list[Output]
    load: Load | None = None
    prefixes: PrefixChanges | None = None


class FleetFront:
    """Replicas have numbers, which are their slots."""

    def __init__(
        self, facts: Facts, most: int, policy: str, queue: int, clock: Callable[[], float], seed: int = 0
    ) -> None:
        """`queue`: requests of a replica beyond its rows, as in the server's admission."""
        self._facts, self._most_each = facts, facts.rows + queue
        self._policy = routing_policy(policy, seed)
        self._table, self._index = ReplicaTable(), PrefixIndex()
        self._meters = [ReplicaMeter(clock) for _ in range(most)]
        for meter in self._meters:
            self._table.add(meter)
        self._loads: dict[int, Load] = {}
        self.running = self.waiting = 0
        """Sequences of all replicas, by their last reports."""
        self._ready: set[int] = set()
        self._slots: list[int] = []

    @property
    def ready(self) -> int:
        """Replicas that take requests."""
        return len(self._slots)

    def starts(self, replica: int) -> None:
        """The replica is ready, with an empty cache."""
        self._meters[replica].started(self._facts)
        self._index.enter(replica, self._facts)
        self.admit(replica, True)

    def admit(self, replica: int, ready: bool) -> None:
        """Whether the replica takes new requests."""
        (self._ready.add if ready else self._ready.discard)(replica)
        self._slots = sorted(self._ready)

    def lose(self, replica: int) -> None:
        """The replica's engine has ended. Its requests still have to end."""
        self._count(replica, None)
        self._meters[replica].lost()
        self._index.leave(replica)
        self.admit(replica, False)

    def route(
        self,
        number: int,
        prompt: Sequence[int],
        generated: int = 0,
        resumed: bool = False,
        chain: Chain | None = None,
    ) -> tuple[int, int] | None:
        """Choose the replica of a request, and note the choice: the replica and the tokens that it is expected to have
        cached. None if every replica has a full queue; a resumed request was admitted before and is never refused."""
        slots = self._slots
        if not slots:
            return None
        cached = self._index.cached_tokens(PromptKeys(prompt, "", self._facts.page_tokens, chain=chain))
        tokens = len(prompt) + generated
        chosen = slots[self._policy.choose(tokens, False, self._table.view(slots, cached))]
        if not resumed and self._meters[chosen].requests >= self._most_each:
            slots = [slot for slot in slots if self._meters[slot].requests < self._most_each]
            if not slots:
                return None
            chosen = slots[self._policy.choose(tokens, False, self._table.view(slots, cached))]
        held = cached.at(chosen)
        self._meters[chosen].sent(number, tokens, held)
        return chosen, held

    def receive(self, replica: int, step: FleetStep) -> None:
        if step.load is None:
            return
        self._count(replica, step.load)
        meter = self._meters[replica]
        meter.report(step.load)
        if step.prefixes is not None:
            self._index.apply(replica, step.prefixes)
        for output in step.outputs:
            if output.tokens:
                meter.answered(output.request)
            if output.finish is not None:
                meter.ended(output.request)

    def retire(self, replica: int, keys: bytes) -> None:
        """No prompt will have these keys: forget that the replica holds them."""
        self._index.apply(replica, PrefixChanges(b"", keys, False))

    def left(self, replica: int, number: int) -> None:
        """The request has left the replica without an end."""
        self._meters[replica].ended(number)

    def _count(self, replica: int, load: Load | None) -> None:
        before = self._loads.pop(replica, None)
        if before is not None:
            self.running -= before.running
            self.waiting -= before.waiting
        if load is not None:
            self._loads[replica] = load
            self.running += load.running
            self.waiting += load.waiting


def facts_of(layout: Layout, rows: int, frames: int, step_tokens: int) -> Facts:
    """The properties of an engine that routing uses."""
    groups = [(group.page_tokens, extent_of(group.window) or 0) for group in layout.paged]
    block = layout.block_tokens
    snapshots = block if layout.recurrent else 0
    return Facts("", 0, 0, rows, frames, block, step_tokens, "", "", groups=groups, snapshots=snapshots)


def load_of(engine: Engine[Any], waiting_tokens: int) -> Load:
    """The engine's load after a step, without the figures that only metrics show. The pace must be measured."""
    scheduler, pages = engine.scheduler, engine.scheduler.state.pages
    totals = engine.totals
    load = Load(
        scheduler.running,
        scheduler.waiting,
        waiting_tokens,
        pages.size - pages.available,
        pages.size,
        0,
        0,
        scheduler.preemptions,
        totals.steps,
        totals.busy,
        0.0,
        0.0,
    )
    load.prefill_ms_per_token, load.step_ms, load.pages_cached = routing_figures(scheduler)
    load.queues, load.quantum_ms = queue_figures(scheduler)
    return load
