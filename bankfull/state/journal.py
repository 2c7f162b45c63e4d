"""The journal of the prefix cache: which keys became available and which were evicted since it was last read.

A front that routes requests between engines follows the cache by it. A key is shortened to its first 8 bytes: 65,536
keys then collide with a probability below 1e-9, and a collision only misleads the choice of a replica. There is no
journal, and no cost, unless one is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from bankfull.state.pages import Pool

KEY_BYTES = 8
MOST_KEYS = 1 << 16
"""Changes that the journal keeps, and keys of one message at most."""
SLOT = "slot"
"""First part of the key of a recurrent snapshot, in the place of a group's number."""
PRIVATE = b"parked"
"""The names of a parked sequence's own state begin with it: nobody else can use it, and nobody after a restart."""


class KeyChanges(NamedTuple):
    """Keys are little-endian, 8 bytes each, one after the other."""

    added: bytes
    dropped: bytes
    reset: bool
    """The reader must forget all keys first: `added` holds all there are, at most MOST_KEYS."""


def short_key(name: bytes) -> int:
    """The first 8 bytes of a block's key, as a number."""
    return int.from_bytes(name[:KEY_BYTES], "little")


def place_tag(group: int | str) -> int:
    """A number XORed to short keys, so that each page group and the snapshots have their own; 0 for group 0."""
    return (1 << 8 * KEY_BYTES) - 1 if group == SLOT else int(group)


class KeyJournal:
    """Follows the pools of one state manager. Every key in it is (group number or SLOT, name of a block)."""

    def __init__(self, pools: Iterable[Pool], most: int = MOST_KEYS) -> None:
        self._pools = tuple(pools)
        self._most = most
        self._changed: dict[Any, bool] = {}
        """Key -> whether it is available now."""
        self._reset = True
        for pool in self._pools:
            pool.journal = self

    def note(self, keys: Iterable[Any], available: bool) -> None:
        """Called by a pool with all keys that it publishes or evicts."""
        if self._reset:
            return  # `take` reads the pools themselves
        for key in keys:
            self._changed[key] = available
        if len(self._changed) > self._most:
            self.reset()

    def reset(self) -> None:
        """The reader starts over: the cache was emptied, or there were too many changes to list."""
        self._reset = True
        self._changed.clear()

    @property
    def changed(self) -> bool:
        """Whether there is anything to take."""
        return self._reset or bool(self._changed)

    def take(self) -> KeyChanges:
        """What has changed since the last call."""
        if self._reset:
            self._reset = False
            # In the order of publication: a chain that is cut off then loses its end, not its start.
            keys = islice(chain.from_iterable(pool.keys() for pool in self._pools), self._most)
            return KeyChanges(packed_keys(keys), b"", True)
        added = packed_keys(key for key, available in self._changed.items() if available)
        dropped = packed_keys(key for key, available in self._changed.items() if not available)
        self._changed.clear()
        return KeyChanges(added, dropped, False)


def packed_keys(keys: Iterable[Any]) -> bytes:
    """The keys, as the state manager publishes them, in 8 bytes each; without those of parked sequences."""
    shared = ((group, name) for group, name in keys if not name.startswith(PRIVATE))
    return b"".join([name[:KEY_BYTES] if group == 0 else _tagged(group, name) for group, name in shared])


def _tagged(group: int | str, name: bytes) -> bytes:
    return (short_key(name) ^ place_tag(group)).to_bytes(KEY_BYTES, "little")
