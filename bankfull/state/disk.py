"""The disk tier: a directory for each model, with a data file of equal places and an index of what is in them.

A directory belongs to one identity: the model's files, the dtypes, the layout and this program's version. Files are
private to the user. An entry of the index is cleared before its place is written and set after it, so a process that is
killed leaves no entry for half a place; what the operating system loses is found by the checksum when it is read. A
process locks its directory; another one with the same model takes the next number.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import struct
import threading
import time
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from bankfull.errors import BankfullError, ConfigError

MAGIC = b"bankfull KV v01\0"
HEADER = struct.Struct("<16sQQ32s")
"""Magic, bytes of a place, bytes of an entry, identity."""
ENTRY = struct.Struct("<QdQI48sI")
"""Stamp, time of writing, bytes, checksum of the content, length and bytes of the key, checksum of the entry."""
MOST_KEY = 47
ABOUT = "about.json"
MOST_ABOUT = 1 << 16
NAMING_BYTES = 12
"""Of an identity, in the name of its directories."""
MOST_DIRECTORIES = 64
"""Processes with the same model that share a path."""
KINDS = ("pages", "slots")


class DamagedPlace(BankfullError):
    """The content of a place is not what was written there."""


@dataclass(frozen=True, slots=True)
class PlaceEntry:
    place: int
    key: bytes
    stamp: int
    written: float
    nbytes: int
    checksum: int


class PlaceFile:
    """The data file and the index of one kind of place. Different places may be read and written by several threads."""

    def __init__(self, directory: Path, kind: str, places: int, place_bytes: int, identity: bytes) -> None:
        self.places, self.place_bytes = places, place_bytes
        self._header = HEADER.pack(MAGIC, place_bytes, ENTRY.size, identity)
        self._data = _open_private(directory / f"{kind}.data")
        self._index = _open_private(directory / f"{kind}.index")
        self._lock = threading.Lock()
        self._entries: dict[int, PlaceEntry] = {}
        self._stamp = self._erased = 0
        if os.pread(self._index, HEADER.size, 0) != self._header:
            os.ftruncate(self._index, 0)
            os.ftruncate(self._data, 0)
            _write_all(self._index, self._header, 0)
        self._read_index()

    def _read_index(self) -> None:
        size = os.fstat(self._index).st_size
        held = min((size - HEADER.size) // ENTRY.size, self.places)
        raw = os.pread(self._index, held * ENTRY.size, HEADER.size) if held > 0 else b""
        data = os.fstat(self._data).st_size
        for number in range(len(raw) // ENTRY.size):
            entry = _parse(number + 1, raw[number * ENTRY.size : (number + 1) * ENTRY.size])
            # A data file that is too short was cut by someone else.
            if entry is not None and entry.nbytes == self.place_bytes and (number + 1) * self.place_bytes <= data:
                self._entries[entry.place] = entry
                self._stamp = max(self._stamp, entry.stamp)
        os.ftruncate(self._index, HEADER.size + self.places * ENTRY.size)
        if data > self.places * self.place_bytes:
            os.ftruncate(self._data, self.places * self.place_bytes)

    def entries(self, oldest: float = 0.0) -> list[PlaceEntry]:
        """What was written since the time `oldest`, in the order of writing."""
        found = [entry for entry in self._entries.values() if entry.written >= oldest]
        return sorted(found, key=lambda entry: entry.stamp)

    def write(self, place: int, key: bytes, content: memoryview) -> None:
        """Raises OSError if the disk is full."""
        assert 1 <= place <= self.places and len(content) == self.place_bytes and len(key) <= MOST_KEY
        with self._lock:
            self._entries.pop(place, None)
            self._stamp += 1
            stamp, erased = self._stamp, self._erased
        at = HEADER.size + (place - 1) * ENTRY.size
        _write_all(self._index, bytes(ENTRY.size), at)
        _write_all(self._data, content, (place - 1) * self.place_bytes)
        entry = PlaceEntry(place, key, stamp, time.time(), len(content), zlib.crc32(content))
        with self._lock:
            if erased == self._erased:
                _write_all(self._index, _packed(entry), at)
                self._entries[place] = entry

    def erase(self) -> None:
        """Forget everything; what threads are writing now is forgotten, too."""
        with self._lock:
            self._entries.clear()
            self._erased += 1
            os.ftruncate(self._index, HEADER.size)
            os.ftruncate(self._index, HEADER.size + self.places * ENTRY.size)
            os.ftruncate(self._data, 0)

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
        os.close(self._data)
        os.close(self._index)


class DiskStore:
    """The directory of one process. `identity`: names what the content belongs to; `about`: the same for people."""

    def __init__(
        self,
        root: Path,
        identity: bytes,
        about: dict[str, Any],
        places: dict[str, int],
        place_bytes: dict[str, int],
        number: int = 0,
    ) -> None:
        """`number`: of the directory, if no other process uses it. `place_bytes`: 0 for places of which this process
        has no part."""
        self.path, self.number, self._lock = _claim(root, identity, number)
        try:
            _replace_text(self.path / ABOUT, json.dumps({**about, "used": time.time()}, indent=1))
            self.files = {kind: PlaceFile(self.path, kind, places[kind], place_bytes[kind], identity) for kind in KINDS}
        except OSError as error:
            raise _unusable(self.path, error) from error

    def erase(self) -> None:
        for file in self.files.values():
            file.erase()

    def close(self) -> None:
        for file in self.files.values():
            file.close()
        os.close(self._lock)


@dataclass(frozen=True, slots=True)
class StoredTier:
    """A directory of the disk tier, for `bankfull cache`."""

    path: Path
    about: dict[str, Any]
    nbytes: int
    entries: int
    used: float
    locked: bool
    """Whether a process uses it now."""


def stored(root: Path) -> Iterator[StoredTier]:
    """Every directory of the disk tier below `root`. Other files are left alone."""
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if not path.is_dir() or path.is_symlink() or not (path / "lock").is_file():
            continue
        about = _read_about(path / ABOUT)
        entries = nbytes = 0
        for kind in KINDS:
            nbytes += sum(_allocated(path / f"{kind}.{part}") for part in ("data", "index"))
            entries += _count(path / f"{kind}.index")
        used = about.get("used")
        yield StoredTier(path, about, nbytes, entries, used if isinstance(used, float) else 0.0, _is_locked(path))


def remove(found: StoredTier) -> bool:
    """Delete a directory, unless a process uses it."""
    lock = _try_lock(found.path)
    if lock is None:
        return False
    shutil.rmtree(found.path)
    os.close(lock)
    return True


def make_room(root: Path, own: Collection[Path], budget: int) -> int:
    """Delete the directories of other models that were not used for the longest time, until all together fit into
    `budget` bytes; the bytes that are left of others."""
    others = sorted((one for one in stored(root) if one.path not in own), key=lambda one: one.used)
    total = sum(one.nbytes for one in others)
    for one in others:
        if total <= budget:
            break
        if remove(one):
            total -= one.nbytes
    return total


def identity_of(about: dict[str, Any]) -> bytes:
    return sha256(json.dumps(about, sort_keys=True).encode()).digest()


def directory_name(identity: bytes, number: int) -> str:
    return f"{identity[:NAMING_BYTES].hex()}-{number}"


def _claim(root: Path, identity: bytes, wanted: int) -> tuple[Path, int, int]:
    """The directory of this identity with the number `wanted`, or the first one that no other process uses: its path,
    number and lock."""
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        for number in (wanted, *range(MOST_DIRECTORIES)):
            path = root / directory_name(identity, number)
            path.mkdir(exist_ok=True, mode=0o700)
            if (lock := _try_lock(path)) is not None:
                return path, number, lock
    except OSError as error:
        raise _unusable(root, error) from error
    raise ConfigError(f"{MOST_DIRECTORIES} processes use the disk tier in {root} already; give another path.")


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"The disk tier cannot use {path}: {error.strerror or error}; give kv_disk another path.")


def _try_lock(path: Path) -> int | None:
    handle = _open_private(path / "lock")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def _is_locked(path: Path) -> bool:
    try:
        lock = _try_lock(path)
    except OSError:
        return True
    if lock is None:
        return True
    os.close(lock)
    return False


def _open_private(path: Path) -> int:
    """A file that only this user may read; never through a symbolic link."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{path.name} is not a regular file")
    os.fchmod(handle, 0o600)
    return handle


def _replace_text(path: Path, text: str) -> None:
    other = path.with_suffix(".new")
    handle = _open_private(other)
    try:
        os.ftruncate(handle, 0)
        _write_all(handle, text.encode(), 0)
    finally:
        os.close(handle)
    other.replace(path)


def _write_all(handle: int, content: bytes | memoryview, at: int) -> None:
    done, view = 0, memoryview(content)
    while done < len(view):
        done += os.pwrite(handle, view[done:], at + done)


def _packed(entry: PlaceEntry) -> bytes:
    key = bytes((len(entry.key),)) + entry.key
    head = ENTRY.pack(entry.stamp, entry.written, entry.nbytes, entry.checksum, key, 0)
    return head[:-4] + zlib.crc32(head[:-4]).to_bytes(4, "little")


def _parse(place: int, raw: bytes) -> PlaceEntry | None:
    """None for an empty or damaged entry."""
    stamp, written, nbytes, checksum, key, own = ENTRY.unpack(raw)
    if not stamp or own != zlib.crc32(raw[:-4]) or key[0] > MOST_KEY:
        return None
    return PlaceEntry(place, key[1 : 1 + key[0]], stamp, written, nbytes, checksum)


def _read_about(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(MOST_ABOUT))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _allocated(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


def _count(index: Path) -> int:
    try:
        raw = index.read_bytes()[HEADER.size :]
    except OSError:
        return 0
    pieces = (raw[at : at + ENTRY.size] for at in range(0, len(raw) - ENTRY.size + 1, ENTRY.size))
    return sum(_parse(1, piece) is not None for piece in pieces)
