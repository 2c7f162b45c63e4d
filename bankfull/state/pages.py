"""A pool of equal places, by id: pages for growing state, slots for recurrent state.

Every id but NULL is always in exactly one of four conditions, and they add up to the pool's size:
  held         referenced (references > 0)
  quarantined  not referenced, but a launched step may still read or write it
  cached       not referenced; its content has a key, and is found again or evicted, oldest first
  free         not referenced, and without content
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from bankfull.state.journal import KeyJournal

RETIRED = object()
"""Key of content that nothing will look for."""
FEWEST_STALE = 64
"""Stale entries in the order of eviction that are always tolerated."""


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
        self.fresh: deque[Hashable] | None = None
        """Keys in the order of their publication, for whoever copies content to a lower tier; None: nobody does."""
        self.leaving = 0
        """Places that are held for a copy to a lower tier only, at most."""
        self._free: list[int] = []
        """Free places that were used before; the newest one is taken first, before places that were never used."""
        # Lists by place grow when a place is first taken, so that a large pool costs what is used of it.
        self._refs, self._last = [0], [-1]
        self._key: list[Hashable | None] = [None]
        self._by_key: dict[Hashable, int] = {}
        self._cached = 0
        self._oldest: deque[int] = deque()
        """Places in the order in which they became cached. A place that was shared since has stale entries here."""
        self._stale = [0]
        """Stale entries of each place in `_oldest`; they come before its valid one."""
        self._first: dict[int, None] = {}
        """Cached places that are evicted before those in `_oldest`, in this order: their content has a copy
        elsewhere."""
        self._waiting: dict[int, int] = {}
        self._release: deque[tuple[int, int]] = deque()

    @property
    def available(self) -> int:
        """Places that `take` could return now."""
        return len(self._free) + self.size + 1 - len(self._refs) + self._cached

    @property
    def free(self) -> int:
        """Places without content."""
        return len(self._free) + self._unused

    @property
    def cached(self) -> int:
        """Unreferenced places whose content can be found by its key."""
        return self._cached

    @property
    def clean(self) -> int:
        """Places that `take` returns without giving up content that is nowhere else."""
        return self.free + len(self._first)

    @property
    def coming(self) -> int:
        """Places that become available by themselves: quarantined ones when the launched steps have settled, and those
        that are copied to a lower tier."""
        return len(self._waiting) + self.leaving

    @property
    def _unused(self) -> int:
        """Places that were never taken: the highest numbers."""
        return self.size + 1 - len(self._refs)

    def grow(self, size: int) -> None:
        """There are so many places from now on, unless there are more already."""
        self.size = max(self.size, size)

    def take(self, count: int) -> list[int] | None:
        """`count` places or None; evicts cached content, oldest first, when there are too few free places."""
        if count > self.available:
            return None
        free = self._free
        if len(free) < count:
            if unused := self._unused:
                self._use(min(count - len(free), unused))
            while len(free) < count:
                self._evict()
        taken = free[: -count - 1 : -1]
        del free[len(free) - count :]
        for place in taken:
            self._refs[place] = 1
        return taken

    def _use(self, count: int) -> None:
        """Places that were never taken become free, as the last ones to be taken."""
        first = len(self._refs)
        self._free[:0] = range(first + count - 1, first - 1, -1)
        self._refs += [0] * count
        self._last += [-1] * count
        self._key += [None] * count
        self._stale += [0] * count

    def _evict(self) -> None:
        """The content that has been cached for the longest time is given up; its place is free."""
        if self._first:
            place = next(iter(self._first))
            del self._first[place]
        else:
            stale, oldest = self._stale, self._oldest
            while stale[place := oldest.popleft()]:
                stale[place] -= 1
        self._cached -= 1
        key, self._key[place] = self._key[place], None
        if key is not RETIRED:
            del self._by_key[key]
            if self.journal is not None:
                self.journal.note((key,), False)
        self._free.append(place)
        self.evictions += 1

    def share(self, place: int) -> None:
        """Add a reference, also to a cached or quarantined place, which is then held again."""
        self.share_all((place,))

    def share_all(self, places: Iterable[int]) -> None:
        refs, waiting = self._refs, self._waiting
        for place in places:
            if refs[place] == 0 and place:
                if place in waiting:
                    del waiting[place]
                else:
                    self._cached -= 1
                    if place in self._first:
                        del self._first[place]
                    else:
                        self._stale[place] += 1
            refs[place] += 1
        refs[0] = 0

    def drop(self, place: int, step: int) -> None:
        """Remove a reference whose last use may be in `step`. Without references, the place is quarantined until that
        step settles."""
        self.drop_all((place,), step)

    def drop_all(self, places: Iterable[int], step: int) -> None:
        refs, last, settled = self._refs, self._last, self.settled
        ended = []
        for place in places:
            if not place:
                continue
            left = refs[place] - 1
            assert left >= 0, f"place {place} is dropped without a reference"
            refs[place] = left
            # An earlier reference may have been used in a later step than the last one.
            if (until := last[place]) < step:
                until = last[place] = step
            if left:
                continue
            if until > settled:
                self._waiting[place] = until
                self._release.append((until, place))
            else:
                ended.append(place)
        if ended:
            self._retire(ended)

    def settle(self, step: int) -> list[int]:
        """All steps up to `step` have finished. Returns the places that moved from quarantine to the free list."""
        self.settled = max(self.settled, step)
        release, waiting = self._release, self._waiting
        ended = []
        while release and release[0][0] <= self.settled:
            stamp, place = release.popleft()
            if waiting.get(place) == stamp:
                del waiting[place]
                ended.append(place)
        return self._retire(ended) if ended else ended

    def publish(self, place: int, key: Hashable) -> bool:
        """Give a held place a key, so that `find` finds it. The first of two places with equal content keeps it."""
        return self.publish_all((place,), (key,)) == 1

    def publish_all(self, places: Iterable[int], keys: Iterable[Hashable]) -> int:
        """`publish` for places and their keys; how many of them have got theirs."""
        by_place, by_key = self._key, self._by_key
        published = []
        for place, key in zip(places, keys, strict=True):
            if place and by_place[place] is None and by_key.setdefault(key, place) == place:
                by_place[place] = key
                published.append(key)
        if self.journal is not None:
            self.journal.note(published, True)
        if self.fresh is not None:
            self.fresh += published
        return len(published)

    def find(self, key: Hashable) -> int | None:
        return self._by_key.get(key)

    def find_first(self, keys: Iterable[Hashable]) -> list[int]:
        """The places of the first keys, up to the first one that is not found."""
        places = list(map(self._by_key.get, keys))
        if None in places:
            del places[places.index(None) :]
        return cast(list[int], places)

    def has_key(self, place: int) -> bool:
        """Whether the place's content is published."""
        return self._key[place] is not None

    def key_of(self, place: int) -> Hashable | None:
        """The key under which the place's content is found; None if there is none."""
        key = self._key[place]
        return None if key is RETIRED else key

    def idle(self, places: Iterable[int]) -> int:
        """How many of these places, which have keys, count as available now, and no longer once they are shared."""
        refs, waiting = self._refs, self._waiting
        return sum([1 for place in places if not refs[place] and place and place not in waiting])

    def alone(self, place: int) -> bool:
        """Whether the place has exactly one reference."""
        return self._refs[place] == 1

    def references(self, place: int) -> int:
        return self._refs[place]

    def is_cached(self, place: int) -> bool:
        """Whether the place counts as available now, and no longer once it is shared."""
        return place < len(self._key) and self._key[place] is not None and self.idle((place,)) == 1

    def retire_keys(self, keys: Iterable[Hashable]) -> None:
        """Nothing will look for these keys again. `find` no longer finds them, and the journal does not report their
        evictions. Their places stay as they are, so that they are evicted in their turn: only the memory of the keys is
        released."""
        for key in keys:
            if (place := self._by_key.pop(key, None)) is not None:
                self._key[place] = RETIRED

    def withdraw(self, key: Hashable) -> None:
        """The content is no longer what the key says, or nobody may find it again. A held place loses its key and may
        get another one; a cached one is evicted in its turn."""
        if (place := self._by_key.pop(key, None)) is not None:
            self._key[place] = None if self._refs[place] else RETIRED
            if self.journal is not None:
                self.journal.note((key,), False)

    def next_evicted(self, count: int) -> list[int]:
        """Up to `count` cached places that will be evicted next, without those that `evict_first` has named."""
        places: list[int] = []
        passed: dict[int, int] = {}
        for place in islice(self._oldest, 4 * count):
            if (seen := passed.get(place, 0)) < self._stale[place]:
                passed[place] = seen + 1
                continue
            places.append(place)
            if len(places) == count:
                break
        return places

    def evict_first(self, place: int) -> None:
        """If the place is cached, its content is given up before any other: there is a copy elsewhere."""
        if self.is_cached(place) and place not in self._first:
            self._stale[place] += 1
            self._first[place] = None

    def adopt(self, keys: Iterable[tuple[int, Hashable]]) -> None:
        """Places with content from an earlier life, and its keys, oldest first; the pool must be new."""
        assert len(self._refs) == 1, "places are adopted before any is taken"
        entries = [(place, key) for place, key in keys if 0 < place <= self.size]
        self._use(max((place for place, _ in entries), default=0))
        for place, key in entries:
            if self._key[place] is None and self._by_key.setdefault(key, place) == place:
                self._key[place] = key
                self._oldest.append(place)
        self._cached = len(self._oldest)
        self._free = [place for place in self._free if self._key[place] is None]

    def forget(self) -> None:
        """Empty the cache: `find` finds nothing; held places stay held."""
        self._free += self._first
        self._first.clear()
        while self._oldest:
            place = self._oldest.popleft()
            if self._stale[place]:
                self._stale[place] -= 1
            else:
                self._free.append(place)
        self._cached = 0
        self._key = [None] * len(self._key)
        self._by_key.clear()
        if self.fresh is not None:
            self.fresh.clear()
        if self.journal is not None:
            self.journal.reset()

    def keys(self) -> Iterable[Hashable]:
        """All keys that `find` finds, in the order of publication."""
        return self._by_key.keys()

    def census(self) -> Census:
        held = sum(1 for refs in self._refs if refs)
        return Census(len(self._free) + self._unused, self._cached, held, len(self._waiting))

    def free_places(self) -> list[int]:
        """The free places, for tests that poison them."""
        return [*range(self.size, self.size - self._unused, -1), *self._free]

    def _retire(self, places: Sequence[int]) -> list[int]:
        """Places without references and without steps are cached if they have a key, and free otherwise: the latter."""
        keys = self._key
        freed = [place for place in places if keys[place] is None]
        self._free += freed
        kept = places if not freed else [place for place in places if keys[place] is not None]
        self._oldest += kept
        self._cached += len(kept)
        if len(self._oldest) > 2 * self._cached + FEWEST_STALE:
            self._drop_stale()
        return freed

    def _drop_stale(self) -> None:
        valid: deque[int] = deque()
        for place in self._oldest:
            if self._stale[place]:
                self._stale[place] -= 1
            else:
                valid.append(place)
        self._oldest = valid
