"""The bytes of a folder of the disk tier, which all models and processes in it share.

A process takes its part in steps, as it fills up: each step is counted, with the folder locked, against what the other
folders hold and what the processes that run have taken. So all of them together never exceed the budget, and none holds
what it does not need. Folders that nobody uses give way.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from bankfull.state.disk_files import ENTRY, FOLDER_BYTES, KINDS
from bankfull.state.disk_folders import COUNTING_SECONDS, DiskUnusable, allocated, counting, make_room, others, stored

log = logging.getLogger("bankfull")

STEPS = 64
"""Steps in which a process takes its part."""
REFUSED_SECONDS = 10.0
"""Time until a process asks again that got nothing."""


@dataclass(frozen=True, slots=True)
class TierSizes:
    """Places of a tier that has the whole budget, and their bytes over all ranks."""

    places: Mapping[str, int]
    place_bytes: Mapping[str, int]
    folders: int = 1

    def at(self, step: int) -> dict[str, int]:
        return {kind: -(-self.places[kind] * step // STEPS) for kind in KINDS}

    def bytes_at(self, step: int) -> int:
        """What the files may take."""
        each = {kind: self.place_bytes[kind] + self.folders * ENTRY.size for kind in KINDS}
        return self.folders * FOLDER_BYTES + sum(count * each[kind] for kind, count in self.at(step).items())

    def after(self, step: int) -> int:
        """The next step that brings places of each kind that is left: where there are few, most steps bring none, and
        copies wait for an answer each time."""
        now, most = self.at(step), self.at(STEPS)
        wanted = [kind for kind in KINDS if now[kind] < most[kind]]
        return next((at for at in range(step + 1, STEPS) if all(self.at(at)[k] > now[k] for k in wanted)), STEPS)

    def step_for(self, last: Mapping[str, int]) -> int:
        """The least step with these places; at least the first one."""
        return next((step for step in range(1, STEPS) if all(self.at(step)[k] >= last[k] for k in KINDS)), STEPS)


class DiskBudget:
    """The part of one process. `own`: its folders; `tell`: makes known to others how many bytes it has."""

    def __init__(
        self,
        root: Path,
        size: int,
        sizes: TierSizes,
        own: Collection[Path],
        tell: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.root, self.size, self.sizes, self.own = root, size, sizes, own
        self._tell, self._clock = tell, clock
        self.step = 0
        self.asking = False
        """Whether an answer is due soon."""
        self._refused_until = -REFUSED_SECONDS
        self._asked = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def places(self) -> dict[str, int]:
        """The places that may be used."""
        return self.sizes.at(self.step)

    def begin(self, last: Mapping[str, int]) -> None:
        """Take what the content of an earlier life needs, up to the places `last`, or as much of it as there is. Raises
        OSError, or DiskUnusable where there is no room for a first step."""
        with counting(self.root):
            held = sum(map(allocated, self.own))
            taken, unused = others(self.root, self.own)
            free = _free_bytes(self.root) + held + sum(nbytes for _, nbytes in unused)
            step = self.sizes.step_for(last)
            while step and self.sizes.bytes_at(step) > min(self.size - taken, free):
                step -= 1
            if not step:
                why = (
                    f"only {_shown(free)} are free on its disk"
                    if free < self.size - taken
                    else f"other processes hold {_shown(taken)} of its {_shown(self.size)}"
                )
                raise DiskUnusable(
                    f"The disk tier cannot use {self.root}: {why}; make room, or give it another path.", why
                )
            self._take(step)

    def ask(self) -> None:
        """Another step would be useful; a thread asks for it. Returns at once."""
        if self.asking or self.step >= STEPS or self._closed or self._clock() < self._refused_until:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="kv-budget", daemon=True)
            self._thread.start()
        self.asking = True
        self._asked.set()

    def grow(self) -> bool:
        """Take the next step, if there is room. Raises OSError."""
        if self.step >= STEPS:
            return False
        with counting(self.root, 0.1 * COUNTING_SECONDS):
            step = self.sizes.after(self.step)
            more = self.sizes.bytes_at(step)
            left = make_room(self.root, self.own, self.size - more)
            if left + more > self.size or more - self.sizes.bytes_at(self.step) > _free_bytes(self.root):
                return False
            self._take(step)
        return True

    def close(self) -> None:
        """Wait for the thread, unless the disk hangs."""
        self._closed = True
        self._asked.set()
        if self._thread is not None:
            self._thread.join(COUNTING_SECONDS)

    def _take(self, step: int) -> None:
        make_room(self.root, self.own, self.size - self.sizes.bytes_at(step))
        self._tell(self.sizes.bytes_at(step))
        self.step = step

    def _serve(self) -> None:
        while True:
            self._asked.wait()
            self._asked.clear()
            if self._closed:
                return
            try:
                grown = self.grow()
            except OSError:  # what can be written shows when it is written
                grown = False
            except Exception:  # the tier goes on with the places that it has
                log.exception("the disk tier cannot ask for more places")
                grown = False
            if not grown:
                self._refused_until = self._clock() + REFUSED_SECONDS
            self.asking = False


def affordable(root: Path, size: int) -> int:
    """`size`, or what is free on the disk with what the folder holds already, if that is less."""
    try:
        free = _free_bytes(root) + sum(one.nbytes for one in stored(root))
    except OSError:
        return size  # what is wrong shows when the folder is opened
    if free < size:
        log.warning(
            "%s of the disk tier do not fit: %s are free in %s; it takes no more than that.",
            _shown(size),
            _shown(free),
            root,
        )
    return min(size, free)


def _free_bytes(root: Path) -> int:
    while not root.exists() and root != root.parent:
        root = root.parent
    stats = os.statvfs(root)
    return stats.f_bavail * stats.f_frsize


def _shown(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"
