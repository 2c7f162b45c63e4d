"""State on its way to other engines: what an engine has computed for them is copied to their exchanges.

An order lists keys and the places that the other engine has granted them. A key is copied as soon as its content is on
the device: pages of a prompt while the rest of it is computed. Content is held only while it is copied, so an order
that is dropped leaves nothing behind. What is evicted before its turn is never copied; whoever waits for it gives up.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

from bankfull.state.exchange import exchange_of
from bankfull.state.journal import SLOT
from bankfull.state.lower_tier import IN_FLIGHT_BYTES, Key, name_in
from bankfull.state.moves import Moves
from bankfull.state.tiers import Tiers
from bankfull.types import Tier, TierAddress

TOGETHER = 16
"""Copies whose end is told together."""


class ShippedKey(NamedTuple):
    order: int
    key: Key
    nbytes: int
    """0: the copy has failed."""


class Shipping:
    """`stored` and `take` may be called on any thread, all else on the engine's."""

    def __init__(self, moves: Moves) -> None:
        self.tiers: Tiers
        """The tiers of the engine; set before anything is shipped."""
        self.on_stored: Callable[[], None] | None = None
        """Called on the thread that has copied, when there is something to take. The engine itself learns of it only
        after its step, which may be long."""
        self._moves = moves
        self._orders: dict[int, dict[int | str, deque[tuple[Key, int]]]] = {}
        """Keys and their addresses, by order and page group, in the order of their tokens. A key behind one that is not
        on the device yet is not there either, so only the first of each line is looked up."""
        self._under_way: dict[int, ShippedKey] = {}
        self._ended: deque[ShippedKey] = deque()
        self._writing: Counter[int] = Counter()
        """Bytes under way, by exchange: an engine that takes nothing does not stop those for others."""

    def add(self, order: int, targets: Iterable[tuple[Key, int]]) -> None:
        lines = self._orders.setdefault(order, {})
        for key, address in targets:
            lines.setdefault(key[0], deque()).append((key, address))

    def drop(self, order: int) -> None:
        """Nobody waits for the rest."""
        self._orders.pop(order, None)

    def __len__(self) -> int:
        """Orders that are not copied to the end."""
        return len(self._orders)

    @property
    def ripe(self) -> bool:
        """Whether a copy could start now."""
        firsts = (line[0] for lines in self._orders.values() for line in lines.values())
        # The ends of those under way wake the engine.
        return any(not self._writing[exchange_of(at)] and self._found(key) is not None for key, at in firsts)

    def advance(self) -> None:
        """Start copies of what is on the device; the next plan carries them."""
        for order, lines in list(self._orders.items()):
            for group, line in list(lines.items()):
                while line and (place := self._found(line[0][0])) is not None:
                    key, address = line[0]
                    nbytes, writing = self.tiers.bytes_of(key), self._writing[exchange_of(address)]
                    if writing and writing + nbytes > IN_FLIGHT_BYTES:
                        break
                    line.popleft()
                    self._start(order, key, place, address, nbytes)
                if not line:
                    del lines[group]
            if not lines:
                del self._orders[order]

    def _found(self, key: Key) -> int | None:
        return self.tiers.device_pool(key).find(key)

    def _start(self, order: int, key: Key, place: int, address: int, nbytes: int) -> None:
        pool = self.tiers.device_pool(key)
        pool.share(place)
        self._writing[exchange_of(address)] += nbytes

        def ended(succeeded: bool) -> None:
            self._writing[exchange_of(address)] -= nbytes
            pool.drop(place, -1)

        src, dst = TierAddress(Tier.DEVICE, place), TierAddress(Tier.EXCHANGE, address)
        started = self._moves.start(src, dst, ended, slot=key[0] == SLOT, key=name_in(Tier.EXCHANGE, key))
        self._under_way[started.id] = ShippedKey(order, key, nbytes)

    def stored(self, transfer: int, succeeded: bool, last: bool) -> None:
        """A copy has ended; `last`: no other one waits."""
        one = self._under_way.pop(transfer)
        self._ended.append(one if succeeded else one._replace(nbytes=0))
        if self.on_stored is not None and (last or len(self._ended) >= TOGETHER):
            self.on_stored()

    def take(self) -> list[ShippedKey]:
        """Copies that have ended since the last call."""
        taken: list[ShippedKey] = []
        with suppress(IndexError):
            while True:
                taken.append(self._ended.popleft())
        return taken
