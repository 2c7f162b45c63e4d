"""One tier below the device: two pools with the keys of the device, what may be written to it now, and whether it is
used at all."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from bankfull.state.journal import SLOT
from bankfull.state.pages import Pool
from bankfull.types import Tier

Key = tuple[int | str, bytes]
"""A paged group's number, or SLOT, and the name of a block of the chain."""
IN_FLIGHT_BYTES, IN_FLIGHT_SECONDS = 64 << 20, 0.03
"""One tier's write-behind that is under way at once, whichever is more: with still more, transfers that somebody waits
for would be delayed."""
PAUSE_SECONDS = 10.0
"""A tier that could not be written, because it is full for example, is left alone for this time."""
MOST_FAILURES = 3
"""Failures, each after a pause and with no success between them, after which a tier is left alone for good."""
AGAIN_SECONDS = 0.02
"""Time until write-behind that had to wait is tried again."""
ROOM_AHEAD = 64
"""A tier asks for more places when this part of those that it has is left."""


def disk_key(key: Key) -> bytes:
    """The name of content in a file or an exchange: the group, or 255 for a slot, and the name of the block."""
    group, name = key
    return bytes((255 if group == SLOT else int(group),)) + name


def key_from_disk(name: bytes) -> Key:
    return (SLOT if name[0] == 255 else name[0]), name[1:]


def name_in(tier: Tier, key: Key) -> bytes:
    """The name that a transfer from or to this tier carries."""
    return disk_key(key) if tier >= Tier.EXCHANGE else b""


class TierRoom(Protocol):
    """`state.disk_budget.DiskBudget`: places that are granted one after the other."""

    @property
    def places(self) -> Mapping[str, int]:
        """The places that may be used, by "pages" and "slots"."""
        ...

    @property
    def asking(self) -> bool:
        """Whether an answer is due soon."""
        ...

    def ask(self) -> None:
        """More places would be useful. Returns at once."""
        ...


@dataclass(slots=True)
class TierTraffic:
    """Counters of one tier."""

    written: int = 0
    """Bytes."""
    read: int = 0
    failed: int = 0
    """Transfers."""


class LowerTier:
    """`rate`: bytes per second of write-behind; 0 = no limit. `room`: grants places beyond the first `pages` and
    `slots`, up to `most`."""

    def __init__(
        self,
        tier: Tier,
        pages: int,
        slots: int,
        *,
        rate: float = 0.0,
        room: TierRoom | None = None,
        most: tuple[int, int] | None = None,
    ) -> None:
        self.tier, self.rate = tier, rate
        self.pages, self.slots = Pool(pages), Pool(slots)
        self.most = most or (pages, slots)
        self.traffic = TierTraffic()
        self.writing = 0
        """Bytes of write-behind under way."""
        self.problem = ""
        """Why the tier is no longer used, in a few words; empty while it is."""
        self._room = room
        self._failures = 0
        self._credit, self._credited = 0.0, 0.0
        self._paused_until = self._again = 0.0
        self._dirty: deque[Key] = deque()

    def pool(self, key: Key) -> Pool:
        return self.slots if key[0] == SLOT else self.pages

    def find(self, key: Key) -> int | None:
        return None if self.problem else self.pool(key).find(key)

    def forget(self) -> None:
        self.pages.forget()
        self.slots.forget()
        self._dirty.clear()

    def wish(self, key: Key) -> None:
        """This content shall be copied here soon."""
        if not self.problem:
            self._dirty.append(key)

    def wishes(self) -> Sequence[Key]:
        return self._dirty

    def next_wish(self) -> Key:
        return self._dirty.popleft()

    def may_write(self, nbytes: int, now: float, measured: float) -> bool:
        """Whether so many bytes of write-behind may start now. `measured`: bytes per second of copies to it."""
        allowed = self._allows(nbytes, now, measured)
        if not allowed:
            self._again = now + AGAIN_SECONDS
        return allowed

    def _allows(self, nbytes: int, now: float, measured: float) -> bool:
        most = max(IN_FLIGHT_BYTES, IN_FLIGHT_SECONDS * measured)
        if self.problem or now < self._paused_until or (self.writing and self.writing + nbytes > most):
            return False
        if self._room is not None and not self._grow(self._room):
            return False
        if not self.rate:
            return True
        self._credit = min(max(self.rate * 0.1, nbytes), self._credit + self.rate * (now - self._credited))
        self._credited = now
        return self._credit >= nbytes

    def _grow(self, room: TierRoom) -> bool:
        """Use the places that were granted, and ask for more. False while the answer decides whether content must be
        given up."""
        full = False
        for pool, granted in ((self.pages, room.places["pages"]), (self.slots, room.places["slots"])):
            pool.grow(granted)
            if pool.size and pool.free <= pool.size // ROOM_AHEAD:
                room.ask()
                full = full or not pool.free
        return not (full and room.asking)

    def wrote(self, nbytes: int) -> None:
        """So many bytes have started."""
        self.writing += nbytes
        if self.rate:
            self._credit -= nbytes

    def succeeded(self) -> None:
        self._failures = 0

    def failed(self, now: float) -> bool:
        """A transfer could not be made: a pause. Many fail at once, which counts once. True if it has failed for so
        long that it should be left alone."""
        self._failures += now >= self._paused_until
        self._paused_until = now + PAUSE_SECONDS
        return self._failures >= MOST_FAILURES

    def switch_off(self, problem: str) -> None:
        """Never use it again; transfers that are under way end as they do."""
        self.problem = problem
        self.forget()

    def wake_at(self) -> float | None:
        """When write-behind that has to wait may go on; None if nothing waits. The same time until it is tried: whoever
        asked at that time for a later one would never try."""
        if not self._dirty:
            return None
        return max(self._paused_until, self._again)
