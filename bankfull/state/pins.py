"""Prefixes that stay in the cache for a time that their owner asked for, whatever else the cache evicts.

A pin holds one reference to each page, and to the snapshot, of its prefix: on the device, or on a lower tier that has a
copy once the device is short of memory. It ends after its time, which every use begins anew. Tenants (API keys) share
what pins may hold; the tenant that holds most gives up its oldest pin first. A pin never makes a request impossible: it
is given up before a running sequence is preempted, and when nothing else could make room for a waiting one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from bankfull.state.journal import SLOT
from bankfull.state.lower_tier import Key
from bankfull.state.pages import Pool
from bankfull.state.prefix import Chain
from bankfull.state.tiers import Tiers
from bankfull.types import Request

if TYPE_CHECKING:
    from bankfull.state.manager import StateManager

MOST_REFERENCES = 1 << 21
"""Keys of all pins together. Pins may share their pages, so that the number of pages does not bound the memory of the
lists."""
COPIES_AT_ONCE = 64
"""Places that are copied to the host in one step, because the device is short of memory."""
MOVED_AT_ONCE = 256
"""Places that leave the device together, at least, where there are so many copies below: finding them takes time."""


@dataclass(slots=True, eq=False)
class Pin:
    tenant: str
    name: bytes
    """The chain's name of the prefix."""
    keys: tuple[Key, ...]
    seconds: float
    ends: float
    """Time on the clock at which it ends if nobody uses it before."""


@dataclass(slots=True)
class HeldPlace:
    """The one reference that all pins together have to a key's content."""

    pool: Pool
    place: int
    pins: int = 0


@dataclass(slots=True)
class Holding:
    """What the pins of one tenant hold; content that several of them share counts once."""

    keys: dict[Key, int] = field(default_factory=dict)
    """Keys, and how many of its pins need each."""
    slots: int = 0
    references: int = 0

    def use(self) -> tuple[int, int, int]:
        """Pages, slots and references."""
        return len(self.keys) - self.slots, self.slots, self.references


@dataclass(slots=True)
class PinCounts:
    given_up: int = 0
    """Pins given up because a sequence lacked memory."""
    over_quota: int = 0
    """Pins dropped, or not made, because their tenant holds its share."""


class Pins:
    def __init__(self, state: StateManager, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`share`: the fraction of each pool, with the tiers below it, that pins may hold."""
        self.all: dict[tuple[str, bytes], Pin] = {}
        """Pins by tenant and name, the one that was used least recently first."""
        self.counts = PinCounts()
        self.clock = clock
        self._state, self._share = state, share
        self._named: dict[bytes, list[Pin]] = {}
        self._held: dict[Key, HeldPlace] = {}
        self._holdings: dict[str, Holding] = {}
        self._uncopied: deque[Key] = deque()
        """Content on the device that was not copied to the host for its pin."""
        self._soonest = inf
        """No pin ends before this time."""

    @property
    def places(self) -> int:
        """Pages and slots that pins hold, on all tiers."""
        return len(self._held)

    # -- the life of a pin

    def settle(self, request: Request, chain: Chain, computed: int, cached: int, first: int) -> int:
        """Keep the prefixes of a request from its number `first` on whose state is complete with `computed` tokens; the
        number of the next one. Notes how many tokens each one newly keeps: `cached` ones were there before."""
        block = self._state.border_tokens
        for number in range(first, len(request.keeps)):
            tokens, seconds = request.keeps[number]
            length = tokens // block * block
            if length > computed:
                return number
            if not request.kept:
                request.kept = [0] * len(request.keeps)
            chain.reach(request.prompt, length)  # a window shorter than a page is matched without names
            if self.keep(request.tenant, chain, length, seconds):
                before = max([cached, *(request.keeps[n][0] // block * block for n in range(number))])
                request.kept[number] = max(0, length - before)
        return len(request.keeps)

    def keep(self, tenant: str, chain: Chain, length: int, seconds: float) -> bool:
        """Pin the first `length` tokens of a chain for so many seconds, or longer if they are pinned already. False if
        nothing is pinned: the prefix is too short, or not in the cache, or too large for the tenant's share."""
        if not self._state.prefix_cache or not length:
            return False
        name = chain.names[length // chain.block]
        pin = self.all.get((tenant, name))
        if pin is None:
            fresh = Pin(tenant, name, tuple(self._state.keys_for(chain, length)), seconds, 0.0)
            if not fresh.keys:
                return False  # nothing of it can be evicted
            if self._exceeds(fresh):
                self.counts.over_quota += 1
                return False
            if not self._acquire(fresh):
                return False
            self._enter(fresh)
            pin = fresh
        else:
            self._repair(pin)
        pin.seconds = max(pin.seconds, seconds)
        self._refresh(pin)
        self._trim()
        return (tenant, name) in self.all

    def used(self, chain: Chain, length: int) -> None:
        """A sequence starts from the first `length` tokens of the chain: the time of every pin on them begins anew."""
        for name in chain.names[1 : length // chain.block + 1]:
            for pin in self._named.get(name, ()):
                self._refresh(pin)

    def advance(self) -> None:
        """End the pins whose time is over, and copy pinned content to the host while the device is short of memory."""
        now = self.clock()
        if now >= self._soonest:
            for pin in [pin for pin in self.all.values() if pin.ends <= now]:
                self._drop(pin)
            self._soonest = min((pin.ends for pin in self.all.values()), default=inf)
        if self._uncopied and (tiers := self._state.tiers) is not None and tiers.short:
            self._copy_down(tiers)

    def relieve(self, pages: int, slots: int) -> bool:
        """Make room for a sequence that lacks so many pages and slots: content with a copy below leaves the device, or
        one pin is given up. False if that is impossible."""
        if self._move_down(pages, slots):
            return True
        wanted = self._wanted(pages, slots)
        # Content of several pins is free only when the last of them has gone.
        for alone in (True, False):
            for pin in self.all.values():
                if any(self._frees(self._held[key], wanted, alone) for key in pin.keys):
                    self._drop(pin)
                    self.counts.given_up += 1
                    return True
        return False

    def clear(self) -> None:
        """The cache is emptied, and the pins with it."""
        for pin in list(self.all.values()):
            self._drop(pin)

    # -- shares

    def _limits(self) -> tuple[float, float, float]:
        """Pages, slots and references that all pins together may hold."""
        pages, slots, tiers = self._state.pages.size, self._state.slots.size, self._state.tiers
        for tier in () if tiers is None else tiers.lasting:
            pages += tier.pages.size
            slots += tier.slots.size
        return self._share * pages, self._share * slots, MOST_REFERENCES

    def _exceeds(self, pin: Pin) -> bool:
        """Whether a new pin is larger than its tenant's equal share, and than what the others leave."""
        slots = sum(1 for key in pin.keys if key[0] == SLOT)
        need = (len(pin.keys) - slots, slots, len(pin.keys))
        tenants = len(self._holdings.keys() | {pin.tenant})
        for number, (wanted, limit) in enumerate(zip(need, self._limits(), strict=True)):
            others = sum(held.use()[number] for tenant, held in self._holdings.items() if tenant != pin.tenant)
            if wanted > max(limit / tenants, limit - others):
                return True
        return False

    def _trim(self) -> None:
        """While pins hold more than they may, the tenant that holds most gives up the one it used least recently."""
        limits = self._limits()
        while True:
            totals = [sum(column) for column in zip((0, 0, 0), *map(Holding.use, self._holdings.values()), strict=True)]
            over = [number for number, limit in enumerate(limits) if totals[number] > limit]
            if not over:
                return
            largest = max(self._holdings, key=lambda tenant: self._holdings[tenant].use()[over[0]])
            self._drop(next(pin for pin in self.all.values() if pin.tenant == largest))
            self.counts.over_quota += 1

    # -- references

    def _acquire(self, pin: Pin) -> bool:
        """A reference to each of its keys, or to none if one is nowhere."""
        holdings = [self._held.get(key) or self._find(key) for key in pin.keys]
        if None in holdings:
            return False
        for key, held in zip(pin.keys, holdings, strict=True):
            assert held is not None
            if not held.pins:
                held.pool.share(held.place)
                self._held[key] = held
                if self._on_device(held):
                    self._uncopied.append(key)
            held.pins += 1
        return True

    def _on_device(self, held: HeldPlace) -> bool:
        return held.pool is self._state.pages or held.pool is self._state.slots

    def _find(self, key: Key) -> HeldPlace | None:
        """Where the content of a key is, the fastest tier first."""
        state = self._state
        pool = state.slots if key[0] == SLOT else state.pages
        if (place := pool.find(key)) is not None:
            return HeldPlace(pool, place)
        if state.tiers is not None and (below := state.tiers.find_lasting(key)) is not None:
            return HeldPlace(below[0].pool(key), below[1])
        return None

    def _enter(self, pin: Pin) -> None:
        self.all[pin.tenant, pin.name] = pin
        self._named.setdefault(pin.name, []).append(pin)
        holding = self._holdings.setdefault(pin.tenant, Holding())
        for key in pin.keys:
            if key not in holding.keys:
                holding.keys[key] = 0
                holding.slots += key[0] == SLOT
            holding.keys[key] += 1
        holding.references += len(pin.keys)

    def _refresh(self, pin: Pin) -> None:
        pin.ends = self.clock() + pin.seconds
        self._soonest = min(self._soonest, pin.ends)
        self.all[pin.tenant, pin.name] = self.all.pop((pin.tenant, pin.name))

    def _repair(self, pin: Pin) -> None:
        """Hold what was computed again because a lower tier's copy was damaged."""
        for key in pin.keys:
            held = self._held[key]
            if held.pool.find(key) != held.place and (fresh := self._find(key)) is not None:
                fresh.pool.share(fresh.place)
                held.pool.drop(held.place, -1)
                held.pool, held.place = fresh.pool, fresh.place

    def _drop(self, pin: Pin) -> None:
        del self.all[pin.tenant, pin.name]
        named = self._named[pin.name]
        named.remove(pin)
        if not named:
            del self._named[pin.name]
        holding = self._holdings[pin.tenant]
        # The newest pages become free to evict first, as those of a sequence do.
        for key in reversed(pin.keys):
            holding.keys[key] -= 1
            if not holding.keys[key]:
                del holding.keys[key]
                holding.slots -= key[0] == SLOT
            held = self._held[key]
            held.pins -= 1
            if not held.pins:
                del self._held[key]
                held.pool.drop(held.place, -1)
        holding.references -= len(pin.keys)
        if not holding.keys:
            del self._holdings[pin.tenant]

    # -- tiers

    def _move_down(self, pages: int, slots: int) -> bool:
        """Where a lower tier has a copy, hold that instead, up to so many pages and slots. True if any were."""
        tiers, moved = self._state.tiers, False
        if tiers is None:
            return False
        lack = {pool: max(count, MOVED_AT_ONCE) if count else 0 for pool, count in self._wanted(pages, slots).items()}
        for key, held in self._held.items():
            if (
                lack.get(held.pool, 0) > 0
                and held.pool.alone(held.place)
                and (below := tiers.find_lasting(key)) is not None
            ):
                tier, place = below
                tier.pool(key).share(place)
                lack[held.pool] -= 1
                held.pool.drop(held.place, -1)
                held.pool.evict_first(held.place)
                held.pool, held.place, moved = tier.pool(key), place, True
        return moved

    def _copy_down(self, tiers: Tiers) -> None:
        keys: list[Key] = []
        while self._uncopied and len(keys) < COPIES_AT_ONCE:
            key = self._uncopied.popleft()
            held = self._held.get(key)
            if held is not None and self._on_device(held) and tiers.find_lasting(key) is None:
                keys.append(key)
        if keys:
            tiers.swap_out(keys)

    def _wanted(self, pages: int, slots: int) -> dict[Pool, int]:
        return {self._state.pages: pages, self._state.slots: slots}

    @staticmethod
    def _frees(held: HeldPlace, wanted: dict[Pool, int], alone: bool) -> bool:
        """Whether the place becomes available when a pin, or all its pins, are dropped."""
        return wanted.get(held.pool, 0) > 0 and held.pool.alone(held.place) and (held.pins == 1 or not alone)
