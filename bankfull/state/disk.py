"""The disk tier: a folder for each model, with a data file of equal places and an index of what is in them.

A folder belongs to one identity: the model's files, the dtypes, the layout and this program's build. Files are private
to the user. An entry of the index is cleared before its place is written and set after it, so a process that is killed
leaves no entry for half a place; what the operating system loses is found by the checksum when it is read. A process
locks its folder; another one with the same model takes the next number.
"""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from hashlib import sha256
from json import dumps
from pathlib import Path
from typing import Any

from bankfull.errors import BankfullError
from bankfull.state.disk_files import (
    ENTRY,
    HEADER,
    KINDS,
    MAGIC,
    MOST_KEY,
    PlaceEntry,
    open_private,
    packed_entry,
    parse_entry,
    read_about,
    write_about,
    write_all,
)
from bankfull.state.disk_folders import claim, next_turn, unusable
from bankfull.state.service_clock import ServiceClock


class DamagedPlace(BankfullError):
    """The content of a place is not what was written there."""


class PlaceFile:
    """The data file and the index of one kind of place. Different places may be read and written by several threads."""

    def __init__(
        self,
        folder: Path,
        kind: str,
        places: int,
        place_bytes: int,
        identity: bytes,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.places, self.place_bytes, self._clock = places, place_bytes, clock
        self._header = HEADER.pack(MAGIC, place_bytes, ENTRY.size, identity)
        self._data = open_private(folder / f"{kind}.data")
        self._index = -1
        self._lock = threading.Lock()
        self._entries: dict[int, PlaceEntry] = {}
        self._stamp = 0
        self._erasures = 0
        self._announced: dict[int, int] = {}
        """Places whose writes wait for a thread, and how often everything was forgotten before."""
        try:
            self._index = open_private(folder / f"{kind}.index")
            if os.pread(self._index, HEADER.size, 0) != self._header:
                os.ftruncate(self._index, 0)
                os.ftruncate(self._data, 0)
                write_all(self._index, self._header, 0)
            self._read_index()
        except BaseException:
            self.close()
            raise

    def _read_index(self) -> None:
        size = os.fstat(self._index).st_size
        held = min((size - HEADER.size) // ENTRY.size, self.places)
        raw = os.pread(self._index, held * ENTRY.size, HEADER.size) if held > 0 else b""
        data = os.fstat(self._data).st_size
        for number in range(len(raw) // ENTRY.size):
            entry = parse_entry(number + 1, raw[number * ENTRY.size : (number + 1) * ENTRY.size])
            # A data file that is too short was cut by someone else.
            if entry is not None and entry.nbytes == self.place_bytes and (number + 1) * self.place_bytes <= data:
                self._entries[entry.place] = entry
                self._stamp = max(self._stamp, entry.stamp)
        self._cut_to(self.places)

    def entries(self, oldest: float | None = None) -> list[PlaceEntry]:
        """What was written since the time `oldest`, in the order of writing."""
        recent = [entry for entry in self._entries.values() if oldest is None or entry.written >= oldest]
        return sorted(recent, key=lambda entry: entry.stamp)

    @property
    def last(self) -> int:
        """The highest place with content."""
        return max(self._entries, default=0)

    def cut(self, places: int) -> None:
        """Give up the content of all places above this one."""
        with self._lock:
            self._entries = {place: entry for place, entry in self._entries.items() if place <= places}
            self._cut_to(places)

    def _cut_to(self, places: int) -> None:
        os.ftruncate(self._index, HEADER.size + places * ENTRY.size)
        os.ftruncate(self._index, HEADER.size + self.places * ENTRY.size)
        if os.fstat(self._data).st_size > places * self.place_bytes:
            os.ftruncate(self._data, places * self.place_bytes)

    def announce(self, place: int) -> None:
        """A write of this place follows: it is kept only if nothing is erased meanwhile."""
        with self._lock:
            self._announced[place] = self._erasures

    def write(self, place: int, key: bytes, content: memoryview) -> None:
        """Raises OSError if the disk is full."""
        assert 1 <= place <= self.places and len(content) == self.place_bytes and len(key) <= MOST_KEY
        with self._lock:
            erasures = self._announced.pop(place, self._erasures)
            if erasures != self._erasures:
                return
            self._entries.pop(place, None)
            self._stamp += 1
            stamp = self._stamp
        at = HEADER.size + (place - 1) * ENTRY.size
        write_all(self._index, bytes(ENTRY.size), at)
        write_all(self._data, content, (place - 1) * self.place_bytes)
        entry = PlaceEntry(place, key, stamp, self._clock(), len(content), zlib.crc32(content))
        with self._lock:
            if erasures == self._erasures:
                write_all(self._index, packed_entry(entry), at)
                self._entries[place] = entry

    def erase(self) -> None:
        """Forget everything; what threads are writing now is forgotten, too."""
        with self._lock:
            self._entries.clear()
            self._erasures += 1
            self._cut_to(0)

    def read(self, place: int, key: bytes, into: memoryview) -> None:
        """Raises DamagedPlace, or OSError if the disk cannot be read."""
        with self._lock:
            entry = self._entries.get(place)
        if entry is None or entry.key != key or entry.nbytes != len(into):
            raise DamagedPlace(f"Place {place} of the disk tier holds something else.")
        done = 0
        while done < len(into):
            count = os.preadv(self._data, [into[done:]], (place - 1) * self.place_bytes + done)
            if not count:
                raise DamagedPlace(f"Place {place} of the disk tier ends after {done} bytes.")
            done += count
        if zlib.crc32(into) != entry.checksum:
            raise DamagedPlace(f"Place {place} of the disk tier has changed since it was written.")

    def close(self) -> None:
        for handle in (self._data, self._index):
            if handle >= 0:
                os.close(handle)
        self._data = self._index = -1


class DiskStore:
    """The folder of one process. `identity`: names what the content belongs to; `about`: the same for people."""

    def __init__(
        self,
        root: Path,
        identity: bytes,
        about: dict[str, Any],
        places: Mapping[str, int],
        place_bytes: Mapping[str, int],
        number: int = 0,
    ) -> None:
        """`number`: of the folder, if no other process uses it. `place_bytes`: 0 for places of which this process has
        no part. Raises DiskUnusable."""
        self.files: dict[str, PlaceFile] = {}
        self.on_close: Callable[[], None] | None = None
        self.path, self.number, self._lock = claim(root, identity, number)
        try:
            before = read_about(self.path)
            kept = before.get("clock")
            self.clock = ServiceClock(kept if isinstance(kept, dict) else {})
            self._about = {**about, "turn": next_turn(root)}
            self.reserve(0)
            for kind in KINDS:
                self.files[kind] = PlaceFile(self.path, kind, places[kind], place_bytes[kind], identity, self.clock.now)
        except OSError as error:
            self.close()
            raise unusable(self.path, error) from error

    def reserve(self, nbytes: int) -> None:
        """Tell other processes how much this one may write. Raises OSError."""
        self._about["reserved"] = nbytes
        write_about(self.path, {**self._about, "used": time.time(), "clock": self.clock.stored()})

    def erase(self) -> None:
        for file in self.files.values():
            file.erase()

    def close(self) -> None:
        if self.on_close is not None:
            self.on_close()
        for file in self.files.values():
            file.close()
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1


def identity_of(about: dict[str, Any]) -> bytes:
    return sha256(dumps(about, sort_keys=True).encode()).digest()
