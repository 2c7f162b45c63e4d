"""The API's backend over several engines: routes each request to a replica, and keeps streams alive when one ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, count, zip_longest
from operator import attrgetter
from random import SystemRandom
from typing import NoReturn

import msgspec

from bankfull.errors import ConfigError, ModelError
from bankfull.fleet.failures import PATIENCE
from bankfull.fleet.prefixes import CachedTokens, PrefixIndex, PromptKeys
from bankfull.fleet.reports import joined_optional
from bankfull.fleet.routing import RoutingPolicy
from bankfull.fleet.table import ReplicaTable
from bankfull.outputs import Delta
from bankfull.sched.policy import BATCH_PRIORITY
from bankfull.serve.engine.backend import Busy, DeadlineExceeded, EngineDied, Unavailable
from bankfull.serve.engine.wire import Facts, Load, PageTables, RequestDone
from bankfull.serve.replicas.fitting import OTHER_WEIGHTS, misfit
from bankfull.serve.replicas.resume import Leg, ResumableStream
from bankfull.serve.replicas.routed_replica import ReplicaLink, RoutedReplica
from bankfull.serve.replicas.view import ReplicaView
from bankfull.submit import Submit

log = logging.getLogger("bankfull.serve")
_slot = attrgetter("slot")

NO_REPLICA = "No replica is running; ask again in a moment."
COUNTERS = (
    "prefix_queries",
    "prefix_hits",
    "preemptions",
    "steps",
    "busy",
    "bytes_moved",
    "flops",
    "decode_busy",
    "decode_bytes",
    "decode_flops",
    "sampled",
    "pins_given_up",
    "pins_over_share",
)
"""Fields of `Load` that only grow while an engine runs."""
DRAFTS = ("drafted", "accepted")
"""The same for counters by the position of a draft token."""
GAUGES = (
    "running",
    "waiting",
    "waiting_tokens",
    "pages_used",
    "pages_total",
    "pages_cached",
    "pins",
    "pinned_places",
)
"""Fields of `Load` that are added up over the replicas. The two rates are not: each holds for one engine."""


def added_up(lines: Sequence[Sequence[int]]) -> list[int]:
    """Sums by position; a shorter line has zeros at its end."""
    return [sum(counts) for counts in zip_longest(*lines, fillvalue=0)]


class ReplicaSet:
    """A `Backend`. All of it runs on one event loop."""

    def __init__(self, links: Mapping[str, ReplicaLink], policy: RoutingPolicy, *, patience: float = PATIENCE) -> None:
        """`links` by name; more can be added while it runs. `patience`: seconds that a stream whose replica has ended
        waits for another one."""
        self.patience = patience
        self._policy = policy
        self._replicas: dict[str, RoutedReplica] = {}
        self._ready: tuple[list[RoutedReplica], list[RoutedReplica]] = ([], [])
        """Replicas that take requests, by slot: those of the newest generation, and the others."""
        self._table, self._index = ReplicaTable(), PrefixIndex()
        self._facts: Facts | None = None
        """Facts of a replica of the newest generation."""
        self._all_facts: Facts | None = None
        self._numbers = count(1)
        self._seeds = SystemRandom()
        self._started = self._closing = False
        self.check_model: Callable[[str], str] = lambda model: ""
        """Why the server's tokenizer or chat template does not fit to a model; empty if they do. May block."""
        self.check_facts: Callable[[str, Facts], str] = lambda replica, facts: ""
        """Why a replica cannot serve beside engines outside of this set; empty if it can."""
        self.on_notify: Callable[[], None] = lambda: None
        """Called whenever a replica has joined, left or changed its state."""
        self._changed = asyncio.Event()
        self._removed_restarts = self._removed_failures = 0
        self._past = dict.fromkeys(COUNTERS, 0.0)
        self._past_drafts: dict[str, list[int]] = {name: [] for name in DRAFTS}
        """Counters of engines that have ended: without them the sums would fall."""
        for name, link in links.items():
            self._enlist(name, link)

    # -- the backend

    @property
    def ready(self) -> bool:
        return not self._closing and any(replica.ready for group in self._ready for replica in group)

    @property
    def facts(self) -> Facts | None:
        """The facts of the model, with the rows and pages of all replicas."""
        return self._all_facts

    @property
    def load(self) -> Load | None:
        """The sum of all replicas; counters never fall, although engines end."""
        self._settle_counters()
        loads = [replica.seen for replica in self._replicas.values() if replica.seen is not None]
        if not loads and not self._past["steps"]:
            return None
        sums = {name: sum(getattr(load, name) for load in loads) for name in (*GAUGES, *COUNTERS)}
        for name, past in self._past.items():
            sums[name] += type(sums[name])(past)
        drafted, accepted = (
            added_up([self._past_drafts[name], *(getattr(load, name) for load in loads)]) for name in DRAFTS
        )
        return Load(**sums, drafted=drafted, accepted=accepted)

    @property
    def optional(self) -> Mapping[str, str]:
        return joined_optional(replica.link.optional for replica in self._replicas.values())

    @property
    def says(self) -> str:
        """The reason of the replica that is nearest to being ready."""
        reasons = [replica.link.says for replica in self._replicas.values() if not replica.refusal]
        return "" if self.ready else next(filter(None, reasons), NO_REPLICA)

    @property
    def restarts(self) -> int:
        return self._removed_restarts + sum(replica.link.restarts for replica in self._replicas.values())

    @property
    def failed_loads(self) -> int:
        return self._removed_failures + sum(replica.link.failed_loads for replica in self._replicas.values())

    def expect(self, samples: int, priority: int = 0, tenant: str = "") -> None:
        refusals: list[Busy | Unavailable] = []
        for replica in chain(*self._ready):
            try:
                replica.link.expect(samples, priority, tenant)
                return
            except (Busy, Unavailable) as error:
                refusals.append(error)
        raise mildest(refusals) or Unavailable(self.says or NO_REPLICA)

    def generate(self, submit: Submit) -> AsyncIterator[list[Delta | RequestDone]]:
        left = submit.seconds_left()
        if left is not None and left <= 0:
            raise DeadlineExceeded("The request's deadline has passed before it was begun.")
        if submit.params.seed is None:
            # An engine would draw a seed that another one cannot know.
            seeded = submit.params.seeded(self._seeds.getrandbits(63))
            submit = replace(submit, params=seeded)
        return ResumableStream(self, submit)

    async def page_tables(self) -> dict[str, PageTables]:
        """The page tables of the ready replicas; one that ends meanwhile is left out."""
        ready = [replica for replica in self._replicas.values() if replica.link.ready]
        asked = await asyncio.gather(*(replica.link.page_tables() for replica in ready), return_exceptions=True)
        return {one.name: tables[""] for one, tables in zip(ready, asked, strict=True) if isinstance(tables, dict)}

    async def reset_cache(self) -> int:
        """Reset the caches of all replicas; one that ends meanwhile has an empty cache anyway."""
        asked = [replica.link.reset_cache() for replica in self._replicas.values() if replica.link.ready]
        freed = await asyncio.gather(*asked, return_exceptions=True)
        return sum(pages for pages in freed if isinstance(pages, int))

    # -- replicas

    async def add(self, name: str, link: ReplicaLink, generation: int = 0) -> None:
        """One more replica. It gets requests as soon as it is ready. Starts it, if the set was started. Replicas of one
        generation have the same weights. New requests go to the newest generation, and to an older one only if that
        refuses them; a request with tokens stays with its weights."""
        self._enlist(name, link, generation)
        if self._started:
            await link.start()

    async def remove(self, name: str, grace: float = 30.0) -> None:
        """Drain a replica and end it: it gets no new requests, online ones may finish there within `grace` seconds,
        and the rest continue on other replicas."""
        replica = self._replicas.get(name)
        if replica is None:
            raise ConfigError(f"There is no replica {name!r}; there are {', '.join(self._replicas) or 'none'}.")
        replica.leaving = True
        self._notify()
        await replica.link.drain(grace)
        await replica.link.close()
        if self._replicas.get(name) is not replica:
            return  # another call has removed it meanwhile
        self._settle_counters()
        if replica.seen is not None:
            self._count_past(replica.seen)
        self._removed_restarts += replica.link.restarts
        self._removed_failures += replica.link.failed_loads
        del self._replicas[name]
        self._index.leave(replica.slot)
        self._table.remove(replica.slot)
        replica.link.on_change = replica.link.on_prefixes = None
        self._check_refused()  # one may have differed from this one only
        self._notify()

    def views(self) -> list[ReplicaView]:
        return [replica.view() for replica in self._replicas.values()]

    def _enlist(self, name: str, link: ReplicaLink, generation: int = 0) -> None:
        if name in self._replicas:
            raise ConfigError(f"There is a replica {name!r} already; give each its own name.")
        replica = self._replicas[name] = RoutedReplica(name, link, self._table, self._index, generation)
        link.on_change = lambda: self._on_change(replica)
        self._on_change(replica)

    def _on_change(self, replica: RoutedReplica) -> None:
        """The replica's engine has become ready, has ended or is given up."""
        facts = replica.link.facts
        if replica.link.ready and facts is not None:
            others = [r for r in self._replicas.values() if r is not replica and not r.refusal]
            same = [r.link.facts for r in others if r.generation == replica.generation]
            replica.refusal = misfit(replica.name, facts, same, [r.link.facts for r in others])
            replica.refusal = replica.refusal or self.check_facts(replica.name, facts)
            if replica.refusal:
                log.error("%s", replica.refusal)
            else:
                if replica.held is None:  # else it is the engine of before, which reports its prefixes only once
                    replica.begin(facts)
                self._check_refused()
        else:
            replica.lose()
        self._notify()

    def _check_refused(self) -> None:
        """Compare the replicas that were refused with those that are there now."""
        for refused in [replica for replica in self._replicas.values() if replica.refusal]:
            if refused.refusal:  # else another one's check has cleared it
                self._on_change(refused)

    def _sum_facts(self) -> Facts | None:
        fitting = [r for r in self._replicas.values() if r.link.facts is not None and not r.refusal]
        if fitting:
            self._facts = max(fitting, key=lambda replica: replica.generation).link.facts
        known = [r.link.facts for r in fitting if r.link.facts is not None]
        if self._facts is None or len(known) < 2:
            return self._facts
        rows, pages = sum(facts.rows for facts in known), sum(facts.pages for facts in known)
        # The ceilings of one machine are not those of all.
        return msgspec.structs.replace(self._facts, rows=rows, pages=pages, ceilings=None)

    def _notify(self) -> None:
        """A replica has joined, left or changed its state: wake all tasks that wait for that."""
        self._all_facts = self._sum_facts()
        ready = sorted((replica for replica in self._replicas.values() if replica.ready), key=_slot)
        newest = max((replica.generation for replica in ready), default=0)
        self._ready = (
            [replica for replica in ready if replica.generation == newest],
            [replica for replica in ready if replica.generation != newest],
        )
        self._changed.set()
        self._changed = asyncio.Event()
        self.on_notify()

    def _settle_counters(self) -> None:
        for replica in self._replicas.values():
            load, seen = replica.link.load, replica.seen
            if seen is not None and (load is None or load.steps < seen.steps):
                self._count_past(seen)  # that engine has ended
            replica.seen = load

    def _count_past(self, load: Load) -> None:
        for name in COUNTERS:
            self._past[name] += getattr(load, name)
        for name in DRAFTS:
            self._past_drafts[name] = added_up([self._past_drafts[name], getattr(load, name)])

    # -- requests

    @property
    def closing(self) -> bool:
        return self._closing

    def dispatch(self, submit: Submit, *, suspect: bool = False, weights: str = "") -> Leg:
        """Submit a request to the replica that the policy chooses among those that admit it; a suspect only where no
        other one is, and one with `weights` only to a replica that has them. Raises Busy or Unavailable if none admits
        it, and EngineDied if none will have its weights again."""
        if weights and not any(r.weights == weights and not r.lost for r in self._replicas.values()):
            raise EngineDied(OTHER_WEIGHTS)
        refusals: list[Busy | Unavailable] = []
        for group in self._ready:
            choices = group.copy()
            if suspect:
                choices = [replica for replica in choices if not replica.meter.suspects]
            if weights:
                choices = [replica for replica in choices if replica.weights == weights]
            if choices and (leg := self._send(choices, submit, suspect, refusals)) is not None:
                return leg
        raise mildest(refusals) or Unavailable(self.says or NO_REPLICA)

    def _send(
        self, choices: list[RoutedReplica], submit: Submit, suspect: bool, refusals: list[Busy | Unavailable]
    ) -> Leg | None:
        """Submit a request to one of these replicas; None, and more `refusals`, if none admits it."""
        tokens = len(submit.prompt) + sum(map(len, submit.generated))
        batch = submit.priority >= BATCH_PRIORITY
        cached = self._cached_tokens(submit, choices)
        while choices:
            replica = choices.pop(self._best(choices, tokens, batch, cached))
            held = cached.at(replica.slot)
            try:
                steps = replica.link.generate(submit)
            except (Busy, Unavailable) as error:
                refusals.append(error)
                continue
            number = next(self._numbers)
            replica.meter.sent(number, tokens, held, submit.params.n, batch, suspect)
            return Leg(replica.name, steps, replica.meter, number, replica.weights)
        return None

    def _best(self, choices: list[RoutedReplica], tokens: int, batch: bool, cached: CachedTokens) -> int:
        """The policy's choice among several replicas."""
        if len(choices) == 1:
            return 0
        for replica in choices:
            if replica.meter.load is not replica.link.load:
                replica.meter.report(replica.link.load)
        return self._policy.choose(tokens, batch, self._table.view([replica.slot for replica in choices], cached))

    def _cached_tokens(self, submit: Submit, choices: list[RoutedReplica]) -> CachedTokens:
        """Tokens of the prompt that each replica holds."""
        if len(choices) < 2 or self._facts is None:
            return CachedTokens()
        reuse = submit.params.prompt_logprobs is None and submit.pool != "mean"
        keys = PromptKeys(submit.prompt, submit.salt, self._facts.page_tokens, reuse=reuse)
        return self._index.cached_tokens(keys)

    async def wait_change(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)

    def resumed(self, replica: str) -> None:
        if (left := self._replicas.get(replica)) is not None:
            left.resumed += 1

    # -- life

    async def start(self) -> None:
        """Returns at once; `wait_ready` waits until a replica has loaded the model."""
        self._started = True
        for replica in list(self._replicas.values()):
            await replica.link.start()

    async def wait_ready(self) -> None:
        """Raises ModelError when every replica has been given up."""
        while not self.ready:
            self._raise_failure()
            await self._changed.wait()

    async def wait_all_ready(self) -> None:
        """Wait until every replica that is there is ready or given up. Raises ModelError when all are given up."""
        await self.wait_ready()
        while any(not replica.ready and not replica.lost for replica in self._replicas.values()):
            await self._changed.wait()

    def shrink(self) -> None:
        """Another server has taken over: replicas that are not needed any more may end."""

    async def wait_failed(self) -> NoReturn:
        """Raises ModelError once every replica has been given up; otherwise waits for ever."""
        while True:
            self._raise_failure()
            await self._changed.wait()

    def _raise_failure(self) -> None:
        failures = [replica.link.failure for replica in self._replicas.values()]
        if failures and None not in failures:
            raise ModelError(failures[0])

    async def drain(self, grace: float) -> None:
        """Refuse new requests; running ones may finish within `grace` seconds."""
        self._closing = True
        self._notify()
        await asyncio.gather(*(replica.link.drain(grace) for replica in self._replicas.values()))

    async def close(self) -> None:
        """End all engines; requests that still run get an error."""
        self._closing = True
        self._notify()
        await asyncio.gather(*(replica.link.close() for replica in self._replicas.values()))


def mildest(refusals: list[Busy | Unavailable]) -> Busy | Unavailable | None:
    """The refusal with the shortest wait."""
    waits = [refusal for refusal in refusals if isinstance(refusal, Busy)]
    if waits:
        return min(waits, key=lambda busy: busy.retry_after)
    return refusals[0] if refusals else None
