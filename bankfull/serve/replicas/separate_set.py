"""Two pools of engines behind one API: one computes prompts, the other decodes.

A request begins on an engine of the first pool, which computes its prompt and its first token, while pages of its state
go to the engine of the second pool that continues it. The second pool is the set itself: it runs everything that has no
prompt to hand over, and prompts too when no engine of the first pool is there.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from bankfull.errors import ModelError
from bankfull.fleet.failures import PATIENCE
from bankfull.fleet.prefixes import CachedTokens, PromptKeys
from bankfull.fleet.reports import joined_optional
from bankfull.fleet.routing import RoutingPolicy
from bankfull.sched.policy import BATCH_PRIORITY
from bankfull.serve.engine.backend import Busy, Unavailable
from bankfull.serve.engine.wire import Load, PageTables
from bankfull.serve.replicas.fitting import border_of, handed_length, state_misfit
from bankfull.serve.replicas.replica_set import COUNTERS, DRAFTS, GAUGES, ReplicaSet, added_up, mildest
from bankfull.serve.replicas.resume import Leg
from bankfull.serve.replicas.routed_replica import ReplicaLink, RoutedReplica
from bankfull.serve.replicas.transit import StateLink, Transit, TransitCounts
from bankfull.serve.replicas.view import ReplicaView
from bankfull.submit import Submit


class SeparateLink(ReplicaLink, StateLink, Protocol):
    """An engine that hands over state or gets it."""


class SeparateSet(ReplicaSet):
    """The replicas of the set decode; `prefill` are the others."""

    def __init__(
        self,
        prefill: Mapping[str, SeparateLink],
        decode: Mapping[str, SeparateLink],
        policy: RoutingPolicy,
        *,
        patience: float = PATIENCE,
        exchanges: Sequence[int] = (),
    ) -> None:
        """`exchanges`: files of the decoding engines' exchanges, in their order; closed with the set."""
        self._links, self._numbers_of = {**prefill, **decode}, {name: i for i, name in enumerate(decode)}
        self._exchanges = list(exchanges)
        self.counts = TransitCounts()
        self.prefill = ReplicaSet({}, policy, patience=patience)
        super().__init__({}, policy, patience=patience)
        self.prefill.check_facts = lambda name, facts: state_misfit(name, facts, self._facts)
        self.check_facts = lambda name, facts: state_misfit(name, facts, self.prefill._facts)
        self.prefill.on_notify = self._notify
        for name, link in decode.items():
            self._enlist(name, link)
        for name, link in prefill.items():
            self.prefill._enlist(name, link)

    # -- engines that come and go

    async def join(self, name: str, link: SeparateLink, number: int | None) -> None:
        """One more engine. `number`: that of its exchange, if it decodes."""
        self._links[name] = link
        if number is None:
            await self.prefill.add(name, link)
        else:
            self._numbers_of[name] = number
            await self.add(name, link)

    async def leave(self, name: str) -> None:
        """End an engine; its requests continue on others."""
        pool = self if name in self._replicas else self.prefill
        await pool.remove(name, 0.0)
        del self._links[name]
        self._numbers_of.pop(name, None)

    # -- requests

    def dispatch(self, submit: Submit, *, suspect: bool = False, weights: str = "") -> Leg:
        if not submit.begun and submit.generates:
            leg = self._begin(submit, suspect)
            if leg is not None:
                return leg
            self.counts.undivided += 1
        return super().dispatch(submit, suspect=suspect, weights=weights)

    def _begin(self, submit: Submit, suspect: bool) -> Leg | None:
        """Begin a request on an engine that computes prompts; None if that is not worth while, or there is none. Raises
        Busy."""
        facts = self._facts
        if facts is None or submit.params.prompt_logprobs is not None or not self.prefill.ready:
            return None
        if not handed_length(facts, len(submit.prompt)):
            return None
        keys = PromptKeys(submit.prompt, submit.salt, facts.page_tokens)
        cached = self._index.cached_tokens(keys)
        target = self._target(submit, cached)
        if target is None or len(submit.prompt) - cached.at(target.slot) <= border_of(facts):
            return None  # what is left is less than a page
        try:
            leg = self.prefill.dispatch(replace(submit, hands_over=True), suspect=suspect)
        except Unavailable:
            return None
        links = self._links[leg.replica], self._links[target.name]
        at = None if (target_facts := target.link.facts) is None else target_facts.exchange_at
        transit = Transit(*links, self._numbers_of[target.name], submit, self.counts, at)
        leg.steps.on_run = transit.begin
        return PromptLeg(self, leg, submit, target, transit)

    def _target(self, submit: Submit, cached: CachedTokens) -> RoutedReplica | None:
        """The engine that will decode it. Raises Busy if none has room and it was not admitted before."""
        choices = list(self._ready[0])
        batch, refusals = submit.priority >= BATCH_PRIORITY, list[Busy | Unavailable]()
        while choices:
            replica = choices.pop(self._best(choices, len(submit.prompt), batch, cached))
            if submit.admitted:
                return replica
            try:
                replica.link.expect(submit.params.n, submit.priority, submit.tenant)
                return replica
            except (Busy, Unavailable) as error:
                refusals.append(error)
        if any(isinstance(refusal, Busy) for refusal in refusals):
            refused = mildest(refusals)
            assert refused is not None
            raise refused
        return None

    def go_on(self, submit: Submit, target: RoutedReplica, transit: Transit | None, weights: str) -> Leg:
        """Continue a request whose prompt was computed, on the engine that has got its state or on another one."""
        if transit is not None and not transit.lost and target.ready:
            leg = self._send([target], replace(submit, expected=transit.expected), False, [])
            if leg is not None:
                return DecodingLeg(leg, transit)
        if transit is not None:
            transit.close()
        return self.dispatch(submit, weights=weights)

    def next_number(self) -> int:
        """A number for a request in a meter."""
        return next(self._numbers)

    # -- both pools

    @property
    def load(self) -> Load | None:
        loads = [load for load in (super().load, self.prefill.load) if load is not None]
        if len(loads) < 2:
            return loads[0] if loads else None
        sums = {name: sum(getattr(load, name) for load in loads) for name in (*GAUGES, *COUNTERS)}
        drafted, accepted = (added_up([getattr(load, name) for load in loads]) for name in DRAFTS)
        return Load(**sums, drafted=drafted, accepted=accepted)

    @property
    def optional(self) -> Mapping[str, str]:
        return joined_optional([super().optional, self.prefill.optional])

    @property
    def restarts(self) -> int:
        return super().restarts + self.prefill.restarts

    @property
    def failed_loads(self) -> int:
        return super().failed_loads + self.prefill.failed_loads

    def views(self) -> list[ReplicaView]:
        return [*self.prefill.views(), *super().views()]

    async def page_tables(self) -> dict[str, PageTables]:
        return {**await self.prefill.page_tables(), **await super().page_tables()}

    async def reset_cache(self) -> int:
        return sum(await asyncio.gather(self.prefill.reset_cache(), super().reset_cache()))

    async def start(self) -> None:
        await super().start()
        await self.prefill.start()

    async def wait_ready(self) -> None:
        """Raises ModelError also when the engines of the two pools do not fit to each other."""
        while not (self.ready and self.prefill.ready):
            self._raise_failure()
            self.prefill._raise_failure()
            for view in self.views():
                if view.state == "refused":
                    raise ModelError(view.problem)
            await self._changed.wait()

    async def wait_all_ready(self) -> None:
        await self.wait_ready()
        await self.prefill.wait_all_ready()
        await super().wait_all_ready()

    async def drain(self, grace: float) -> None:
        await asyncio.gather(self.prefill.drain(grace), super().drain(grace))

    async def close(self) -> None:
        await asyncio.gather(self.prefill.close(), super().close())
        while self._exchanges:
            os.close(self._exchanges.pop())


class PromptLeg(Leg):
    """The part of a stream that runs on an engine that computes prompts, while its state goes to another one."""

    __slots__ = ("_away",)

    def __init__(
        self, replicas: SeparateSet, leg: Leg, submit: Submit, target: RoutedReplica, transit: Transit | None
    ) -> None:
        super().__init__(leg.replica, leg.steps, *leg.detach(), leg.weights)
        self._away: Onward | None = Onward(replicas, leg, submit, target, transit)

    def hand_over(self) -> Onward:
        away, self._away = self._away, None
        assert away is not None, "a request is handed over once"
        return away

    def end(self) -> None:
        super().end()
        if self._away is not None:
            self._away.close()
            self._away = None


class Onward:
    """A request on its way: a `HandOver`. It counts as one of the target's, so that others go elsewhere."""

    def __init__(
        self, replicas: SeparateSet, leg: Leg, submit: Submit, target: RoutedReplica, transit: Transit | None
    ) -> None:
        self.weights = leg.weights
        self._replicas, self._target, self._transit = replicas, target, transit
        self._loop = asyncio.get_running_loop()
        self._number: int | None = replicas.next_number()
        target.meter.sent(self._number, 1, 0, submit.params.n, submit.priority >= BATCH_PRIORITY)

    async def wait(self, most: float) -> None:
        if self._transit is not None:
            await self._transit.wait(most)

    def account(self) -> dict[str, Any]:
        return {"to": self._target.name, **({} if self._transit is None else self._transit.account())}

    def go(self, submit: Submit) -> Leg:
        transit, self._transit = self._transit, None
        self._leave_meter()
        return self._replicas.go_on(submit, self._target, transit, self.weights)

    def close(self) -> None:
        self._leave_meter()
        transit, self._transit = self._transit, None
        if transit is not None:
            transit.close()

    def _leave_meter(self) -> None:
        number, self._number = self._number, None
        if number is not None:
            self._target.meter.ended(number)

    def __del__(self) -> None:
        if self._number is not None:
            # Garbage is collected on any thread, and after the end of the event loop too.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(_dropped, self._transit, self._target, self._number)


def _dropped(transit: Transit | None, target: RoutedReplica, number: int) -> None:
    target.meter.ended(number)
    if transit is not None:
        transit.close()


class DecodingLeg(Leg):
    """The engine releases what has arrived when the request gets a row; the first token shows that."""

    __slots__ = ("_transit",)

    def __init__(self, leg: Leg, transit: Transit) -> None:
        super().__init__(leg.replica, leg.steps, *leg.detach(), leg.weights)
        self._transit: Transit | None = transit

    def answered(self) -> None:
        super().answered()
        transit, self._transit = self._transit, None
        if transit is not None:
            transit.taken()

    def end(self) -> None:
        super().end()
        transit, self._transit = self._transit, None
        if transit is not None:
            transit.close()

    def __del__(self) -> None:
        super().__del__()
        if self._transit is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._transit.close)
