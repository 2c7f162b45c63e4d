"""Tiers below the device: pinned host memory, an exchange and a file, each a pair of pools, with the same keys as the
device.

Content moves down by write-behind, as soon as it is published: when the device needs a place, a copy of what it holds
is already below, however many places are needed at once. It moves up for a sequence that waits (`Fetch`): pages of the
device are taken, filled beside the steps, and published there, so that admission finds the prefix on the device. A key
names the same content everywhere, so the copies of a tier need no other bookkeeping than its pools. Nothing moves down
to the exchange: another engine fills it (`state.expected`), and `state.shipping` fills those of other engines.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bankfull.state.journal import PRIVATE, SLOT
from bankfull.state.lower_tier import Key, LowerTier, name_in
from bankfull.state.moves import Moves
from bankfull.state.pages import Pool
from bankfull.state.transfer_rates import TransferRates
from bankfull.types import Tier, TierAddress

if TYPE_CHECKING:
    from bankfull.state.shipping import Shipping

log = logging.getLogger("bankfull")

NEAR = 0.125
"""Fraction of the device's places that shall be free, or have a copy on the host and be evicted first."""
STARTED_FIRST, STARTED_AT_ONCE = 16, 64
"""Transfers of one direction that a plan starts: few if the device copies nothing yet, so that it begins early. A plan
that follows upon more published pages starts as many: copies must keep up with prefill."""
PREPARED_AT_ONCE = 256
"""Places whose eviction one plan prepares."""


@dataclass(slots=True, eq=False)
class Fetch:
    """A prefix on its way to the device."""

    length: int
    """Tokens whose state is on the device when all has arrived."""
    expected: float
    """Predicted seconds."""
    begun: float
    held: list[tuple[Pool, int]] = field(default_factory=list)
    """Places of the device that it holds until the sequence is admitted."""
    todo: deque[Key] = field(default_factory=deque)
    """Content whose transfer has not started."""
    pending: int = 0
    """Transfers under way that it waits for."""
    short: bool = False
    """Whether the device had no room for all of it."""
    released: bool = False

    @property
    def done(self) -> bool:
        return not self.pending and not self.todo


class Tiers:
    """Moves content between the device's pools and the tiers below. `page_bytes`, `slot_bytes`: of one place."""

    def __init__(
        self,
        pages: Pool,
        slots: Pool,
        lower: Sequence[LowerTier],
        moves: Moves,
        *,
        page_bytes: int,
        slot_bytes: int,
        rates: TransferRates | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lower = tuple(sorted(lower, key=lambda tier: tier.tier))
        self.rates = rates or TransferRates()
        self._pages, self._slots, self._moves, self._clock = pages, slots, moves, clock
        self._page_bytes, self._slot_bytes = page_bytes, slot_bytes
        self.lasting = [tier for tier in self.lower if tier.tier != Tier.EXCHANGE]
        self._near = [tier for tier in self.lasting if tier.tier == Tier.HOST]
        """Tiers fast enough to make room for somebody who waits."""
        self.shipping: Shipping | None = None
        """Set in an engine that computes prompts for others."""
        self.erase: Callable[[], None] | None = None
        """Clears what outlives the process."""
        self.problems: Mapping[Tier, str] = {}
        """The last error of each tier, in a few words."""
        self._cancelling = False
        self._fetches: deque[Fetch] = deque()
        """Fetches with content whose transfer has not started."""
        self._leaving: deque[tuple[Key, int]] = deque()
        """Content that is swapped out, and its places, which are held until its transfer starts."""
        self._arriving: dict[Key, list[Fetch]] = {}
        """Keys on their way to the device, and the fetches that wait for them."""
        for pool in (pages, slots):
            pool.fresh = deque() if self.lasting else None

    def bytes_in(self, tier: LowerTier) -> tuple[int, int]:
        """Bytes that a tier holds, and that it could hold."""
        sizes = ((tier.pages, self._page_bytes), (tier.slots, self._slot_bytes))
        used = sum((pool.size - pool.free) * nbytes for pool, nbytes in sizes)
        return used, tier.most[0] * self._page_bytes + tier.most[1] * self._slot_bytes

    def forget(self) -> None:
        """Forget the content of all lower tiers; on the disk, too."""
        self._let_stay()
        # A copy that starts later than `erase` would leave its content where the next process finds it.
        self._cancelling = True
        self._moves.cancel(lambda transfer: transfer.src.tier == Tier.DEVICE and transfer.dst.tier == Tier.DISK)
        self._cancelling = False
        for tier in self.lower:
            tier.forget()
        if self.erase is not None:
            self.erase()

    def begin_generation(self) -> None:
        """Nobody will look for the content of lower tiers: the keys are others from now on. That of the disk is left to
        later processes."""
        self._let_stay()
        for tier in self.lower:
            if tier.tier != Tier.DISK:
                tier.forget()
            elif tier.pages.cached + tier.slots.cached:
                log.info("the disk tier keeps what was computed with the weights of before, for a later start.")

    def _failed(self, tier: LowerTier) -> None:
        """A transfer to or from this tier could not be made."""
        tier.traffic.failed += 1
        if tier.failed(self._clock()) and not tier.problem:
            why = self.problems.get(tier.tier, "its transfers fail")
            tier.switch_off(why)
            log.error("the %s tier is not used any longer: %s, again and again.", tier.tier.name.lower(), why)

    def device_pool(self, key: Key) -> Pool:
        return self._slots if key[0] == SLOT else self._pages

    def bytes_of(self, key: Key) -> int:
        return self._slot_bytes if key[0] == SLOT else self._page_bytes

    # -- down

    def write_behind(self) -> None:
        """Start the copies whose time has come; the next plan carries them."""
        now, published = self._clock(), 0
        if self.shipping is not None:
            self.shipping.advance()
        for pool in (self._pages, self._slots):
            while pool.fresh:
                key = pool.fresh.popleft()
                if not key[1].startswith(PRIVATE):  # type: ignore[index]
                    published += 1
                    for tier in self.lasting:
                        tier.wish(key)  # type: ignore[arg-type]
        for tier in self.lower:
            self._grant(tier, max(STARTED_AT_ONCE, published), now)
        for tier in self._near:
            for pool in (self._pages, self._slots):
                self._prepare_eviction(tier, pool, now)

    def _grant(self, tier: LowerTier, most: int, now: float) -> None:
        """Start copies that were wished for, in the order of the wishes."""
        until = len(self._moves) + most
        measured = self.rates.of(Tier.DEVICE, tier.tier)
        while tier.wishes() and len(self._moves) < until:
            if not tier.may_write(self.bytes_of(tier.wishes()[0]), now, measured):
                return
            self._copy_down(tier, tier.next_wish())

    def _prepare_eviction(self, tier: LowerTier, pool: Pool, now: float) -> None:
        """Let the device evict first what has a copy; of what will be evicted soon and has none, because the tier
        forgot it or could not take it, start one."""
        lack = int(NEAR * pool.size) + 1 - pool.clean
        if lack <= 0 or not pool.size:
            return
        measured = self.rates.of(Tier.DEVICE, tier.tier)
        for place in pool.next_evicted(min(lack, PREPARED_AT_ONCE)):
            key = pool.key_of(place)
            if key is None or tier.find(key) is not None:  # type: ignore[arg-type]
                pool.evict_first(place)
            elif not tier.may_write(self.bytes_of(key), now, measured) or not self._copy_down(tier, key):  # type: ignore[arg-type]
                return

    def _copy_down(self, tier: LowerTier, key: Key) -> bool:
        """False if the tier has no room."""
        pool, below, nbytes = self.device_pool(key), tier.pool(key), self.bytes_of(key)
        place = pool.find(key)
        if place is None or below.find(key) is not None:
            return True
        taken = below.take(1)
        if taken is None:
            return False
        leaves = tier in self._near and not pool.references(place)
        pool.share(place)
        pool.leaving += leaves
        tier.wrote(nbytes)

        def ended(succeeded: bool) -> None:
            pool.leaving -= leaves
            tier.writing -= nbytes
            if succeeded:
                tier.traffic.written += nbytes
                tier.succeeded()
                if pool.key_of(place) == key:  # else it was withdrawn meanwhile
                    below.publish(taken[0], key)
            elif not self._cancelling:
                self._failed(tier)
            below.drop(taken[0], -1)
            pool.drop(place, -1)
            if succeeded and leaves:
                pool.evict_first(place)

        src, dst = TierAddress(Tier.DEVICE, place), TierAddress(tier.tier, taken[0])
        self._moves.start(src, dst, ended, slot=key[0] == SLOT, key=name_in(tier.tier, key))
        return True

    def swap_out(self, keys: Sequence[Key]) -> bool:
        """Copy these to the host: their places are needed, and a parked sequence will come back to them. It is True if
        copies have started; `swap_more` starts the rest."""
        for key in keys if self._near else ():
            pool = self.device_pool(key)
            if (place := pool.find(key)) is not None:
                pool.share(place)
                pool.leaving += 1
                self._leaving.append((key, place))
        return self.swap_more()

    def swap_more(self) -> bool:
        """Start the next copies of what is swapped out, as few at once as in `advance`. True if one has started."""
        before = len(self._moves)
        most = STARTED_AT_ONCE if any(tier.writing for tier in self._near) else STARTED_FIRST
        while self._leaving and len(self._moves) < before + most:
            key, place = self._leaving.popleft()
            self._let_go(key, place)
            if not all(self._copy_down(tier, key) for tier in self._near):
                self._let_stay()
        return len(self._moves) > before

    def _let_stay(self) -> None:
        """Swap out no more."""
        while self._leaving:
            self._let_go(*self._leaving.popleft())

    def _let_go(self, key: Key, place: int) -> None:
        pool = self.device_pool(key)
        pool.leaving -= 1
        pool.drop(place, -1)

    @property
    def short(self) -> bool:
        """Whether the device has few places that can be taken without losing content, and there is a host tier."""
        return bool(self._near) and any(
            pool.size and pool.clean < NEAR * pool.size for pool in (self._pages, self._slots)
        )

    @property
    def swapping(self) -> bool:
        """Whether content leaves the device for the host to make room."""
        return bool(self._leaving) or any(pool.leaving for pool in (self._pages, self._slots))

    @property
    def waits(self) -> bool:
        """Whether there are copies that have not started."""
        return self._ripe or any(tier.wishes() for tier in self.lower)

    @property
    def _ripe(self) -> bool:
        """Whether there are copies that the next plan may start."""
        waits = self._pages.fresh or self._slots.fresh or self._fetches or self._leaving
        return bool(waits) or (self.shipping is not None and self.shipping.ripe)

    def wake_at(self) -> float | None:
        """When write-behind may go on although nothing else happens; None if it need not."""
        if self._ripe:
            return self._clock()
        return min((at for tier in self.lower if (at := tier.wake_at()) is not None), default=None)

    # -- up

    def find(self, key: Key) -> tuple[LowerTier, int] | None:
        """The fastest tier that has this content, and its place there."""
        for tier in self.lower:
            if (place := tier.find(key)) is not None:
                return tier, place
        return None

    def find_lasting(self, key: Key) -> tuple[LowerTier, int] | None:
        """The same without the exchange, where content stays for a moment only."""
        return next(((tier, place) for tier in self.lasting if (place := tier.find(key)) is not None), None)

    def seconds_up(self, keys: Sequence[Key]) -> float:
        """Predicted seconds until these are on the device. Content of the exchange counts nothing: another engine has
        computed it so that this one need not, however fast it would be."""
        total = 0.0
        for key in keys:
            source = None if self.device_pool(key).find(key) is not None else self.find(key)
            if source is not None and source[0].tier != Tier.EXCHANGE:
                total += self.bytes_of(key) / self.rates.of(source[0].tier, Tier.DEVICE)
        return total

    def seconds_down_and_up(self, pages: int, slots: int) -> float | None:
        """Predicted seconds to copy so much to the host and back; None without a host tier."""
        for tier in self._near:
            nbytes = pages * self._page_bytes + slots * self._slot_bytes
            down, up = self.rates.of(Tier.DEVICE, tier.tier), self.rates.of(tier.tier, Tier.DEVICE)
            return nbytes / down + nbytes / up
        return None

    def fetch(self, keys: Sequence[Key], length: int, expected: float) -> Fetch | None:
        """Bring this content to the device, and hold it there until `release`; None when the device has no room, or
        something of it is nowhere. The keys are in the order of their tokens."""
        there: list[tuple[Pool, int]] = []
        lacking: deque[Key] = deque()
        for key in keys:
            pool = self.device_pool(key)
            if (place := pool.find(key)) is not None:
                there.append((pool, place))
            elif key in self._arriving or self.find(key) is not None:
                lacking.append(key)
            else:
                return None
        for pool in (self._pages, self._slots):
            taken = self.promised(pool) + self._absent(lacking, pool)
            if taken > pool.available - sum(1 for owner, place in there if owner is pool and pool.is_cached(place)):
                return None
        fetch = Fetch(length, expected, self._clock(), todo=lacking)
        for pool, place in there:
            pool.share(place)
            fetch.held.append((pool, place))
        self._fetches.append(fetch)
        return fetch

    def promised(self, pool: Pool) -> int:
        """Places of the device that fetches will take."""
        return sum(self._absent(fetch.todo, pool) for fetch in self._fetches)

    def _absent(self, keys: Iterable[Key], pool: Pool) -> int:
        return sum(self.device_pool(key) is pool and key not in self._arriving for key in keys)

    def advance(self) -> None:
        """Start the next copies of the fetches. Only a few start in each plan, so that the device copies while the host
        prepares the next ones."""
        left = STARTED_AT_ONCE if self._arriving else STARTED_FIRST
        while self._fetches and left:
            fetch = self._fetches[0]
            while fetch.todo and left:
                left -= 1
                self._bring(fetch.todo.popleft(), fetch)
            if fetch.todo:
                return
            self._fetches.popleft()

    def _bring(self, key: Key, fetch: Fetch) -> None:
        pool = self.device_pool(key)
        if (place := pool.find(key)) is not None:  # it has come by other ways
            pool.share(place)
            fetch.held.append((pool, place))
        elif key in self._arriving:
            fetch.pending += 1
            self._arriving[key].append(fetch)
        elif self.find(key) is None or not pool.available:
            fetch.todo.clear()  # what comes after it is worth nothing
            fetch.short = not pool.available
        else:
            fetch.pending += 1
            self._arriving[key] = [fetch]
            self._copy_up(key)

    def _copy_up(self, key: Key) -> None:
        origin, pool, nbytes = self.find(key), self.device_pool(key), self.bytes_of(key)
        taken = pool.take(1)
        assert origin is not None and taken is not None, "_bring() has looked"
        (tier, below), (place,) = origin, taken
        source = tier.pool(key)
        source.share(below)

        def ended(succeeded: bool) -> None:
            if succeeded:
                tier.traffic.read += nbytes
                tier.succeeded()
                pool.publish(place, key)
            else:  # damaged, or it cannot be read: it is computed again
                if tier.tier in self.problems:
                    self._failed(tier)
                else:
                    tier.traffic.failed += 1
                source.withdraw(key)
            for fetch in self._arriving.pop(key):
                fetch.pending -= 1
                if succeeded and not fetch.released:
                    pool.share(place)
                    fetch.held.append((pool, place))
            source.drop(below, -1)
            pool.drop(place, -1)

        src, dst = TierAddress(tier.tier, below), TierAddress(Tier.DEVICE, place)
        self._moves.start(src, dst, ended, slot=key[0] == SLOT, key=name_in(tier.tier, key))

    def release(self, fetch: Fetch) -> None:
        """The sequence was admitted, or does not wait for it any longer."""
        fetch.released = True
        fetch.todo.clear()
        for pool, place in fetch.held:
            pool.drop(place, -1)
        fetch.held.clear()

    def withdraw(self, keys: Sequence[Key]) -> None:
        """Nobody will look for this content again."""
        for key in keys:
            for pool in (self.device_pool(key), *(tier.pool(key) for tier in self.lower)):
                pool.withdraw(key)

    def check(self) -> None:
        for tier in self.lower:
            for pool in (tier.pages, tier.slots):
                census = pool.census()
                assert census.total == pool.size, f"{tier.tier.name}: {pool.size} places add up to {census}"
