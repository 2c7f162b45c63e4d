"""A pool of equal places, by id: pages for growing state, slots for recurrent state.

Every id but NULL is always in exactly one of four conditions, and they add up to the pool's size:
  held         referenced (references > 0)
  quarantined  not referenced, but a launched step may still read or write it
  cached       not referenced; its content has a key, and is found again or evicted, oldest first
  free         not referenced, and without content
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bankfull.state.journal import KeyJournal


@dataclass(frozen=True, slots=True)
class Census:
    free: int
    cached: int
    held: int
    quarantined: int

    @property
    def total(self) -> int:
        return self.free + self.cached + self.held + self.quarantined


class Pool:
    def __init__(self, size: int) -> None:
        self.size = size
        self.settled = -1
        self.evictions = 0
        self.journal: KeyJournal | None = None
        """Follows every key that `find` finds; None: not followed."""
        self._free = list(range(size, 0, -1))
        self._refs = [0] * (size + 1)
        self._last = [-1] * (size + 1)
        self._key: dict[int, Hashable] = {}
        self._by_key: dict[Hashable, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._waiting: dict[int, int] = {}
        self._release: deque[tuple[int, int]] = deque()

    @property
    def available(self) -> int:
        """Places that `take` could return now."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        """Unreferenced places whose content can be found by its key."""
        return len(self._cached)

    @property
    def coming(self) -> int:
        """Quarantined places, which become available when the launched steps have settled."""
        return len(self._waiting)

    def take(self, count: int) -> list[int] | None:
        """`count` places or None; evicts cached content, oldest first, when the free list is too short."""
        if count > self.available:
            return None
        while len(self._free) < count:
            oldest, _ = self._cached.popitem(last=False)
            key = self._key.pop(oldest)
            del self._by_key[key]
            if self.journal is not None:
                self.journal.note(key, False)
            self._free.append(oldest)
            self.evictions += 1
        taken = [self._free.pop() for _ in range(count)]
        for place in taken:
            self._refs[place] = 1
        return taken

    def share(self, place: int) -> None:
        """Add a reference, also to a cached or quarantined place, which is then held again."""
        if not place:
            return
        if self._refs[place] == 0:
            if place in self._waiting:
                del self._waiting[place]
            else:
                del self._cached[place]
        self._refs[place] += 1

    def drop(self, place: int, step: int) -> None:
        """Remove a reference whose last use may be in `step`. Without references, the place is quarantined until that
        step settles."""
        if not place:
            return
        assert self._refs[place] > 0, f"place {place} is dropped without a reference"
        self._refs[place] -= 1
        # An earlier reference may have been used in a later step than the last one.
        step = self._last[place] = max(step, self._last[place])
        if self._refs[place]:
            return
        if step > self.settled:
            self._waiting[place] = step
            self._release.append((step, place))
        else:
            self._retire(place)

    def drop_all(self, places: Iterable[int], step: int) -> None:
        for place in places:
            self.drop(place, step)

    def settle(self, step: int) -> list[int]:
        """All steps up to `step` have finished. Returns the places that moved from quarantine to the free list."""
        self.settled = max(self.settled, step)
        freed = []
        while self._release and self._release[0][0] <= self.settled:
            stamp, place = self._release.popleft()
            if self._waiting.get(place) == stamp:
                del self._waiting[place]
                if self._retire(place):
                    freed.append(place)
        return freed

    def publish(self, place: int, key: Hashable) -> bool:
        """Give a held place a key, so that `find` finds it. The first of two places with equal content keeps it."""
        if not place or key in self._by_key or place in self._key:
            return False
        self._by_key[key] = place
        self._key[place] = key
        if self.journal is not None:
            self.journal.note(key, True)
        return True

    def find(self, key: Hashable) -> int | None:
        return self._by_key.get(key)

    def is_cached(self, place: int) -> bool:
        """Whether the place counts as available now, and no longer once it is shared."""
        return place in self._cached

    def forget(self) -> None:
        """Empty the cache: `find` finds nothing; held places stay held."""
        for place in self._cached:
            self._free.append(place)
        self._cached.clear()
        self._key.clear()
        self._by_key.clear()
        if self.journal is not None:
            self.journal.reset()

    def keys(self) -> Iterable[Hashable]:
        """All keys that `find` finds, in the order of publication."""
        return self._by_key.keys()

    def census(self) -> Census:
        held = sum(1 for refs in self._refs if refs)
        return Census(len(self._free), len(self._cached), held, len(self._waiting))

    def free_places(self) -> list[int]:
        """The free places, for tests that poison them."""
        return list(self._free)

    def _retire(self, place: int) -> bool:
        if place in self._key:
            self._cached[place] = None
            return False
        self._free.append(place)
        return True
