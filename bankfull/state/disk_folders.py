"""The folders of the disk tier: which are ours, what is in them, who uses them, and how they are deleted.

A folder is ours if its name begins with the identity that one of its indexes carries behind our mark, and if it has our
description. Listing opens files to read them, and nothing else. Deleting removes the files that we write, by name, and
the folder if nothing else is in it. No symbolic link is followed.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bankfull.errors import ConfigError
from bankfull.state.disk_files import (
    ABOUT,
    ENTRY,
    HEADER,
    KINDS,
    LOCK,
    MAGIC,
    OWN_FILES,
    number_in,
    open_private,
    parse_entry,
    read_about,
    read_start,
)

NAMING_BYTES = 12
"""Bytes of an identity in the name of its folders."""
MOST_FOLDERS = 64
"""Processes with the same model that share a path."""
COUNTING = ".budget"
"""Locked by a process that counts, claims or deletes folders."""
COUNTING_SECONDS = 5.0
"""How long another process may take for that."""
_NAME = re.compile(rf"([0-9a-f]{{{2 * NAMING_BYTES}}})-[0-9]{{1,3}}")


class DiskUnusable(ConfigError):
    """The disk tier cannot be used here and now: one sentence. What it holds is only a copy. `brief`: why,
    without names of files."""

    def __init__(self, sentence: str, brief: str) -> None:
        super().__init__(sentence)
        self.brief = brief


@dataclass(frozen=True, slots=True)
class StoredTier:
    """A folder of the disk tier, for `bankfull cache`."""

    path: Path
    about: dict[str, Any]
    nbytes: int
    entries: int
    used: float
    locked: bool
    """Whether a process uses it now."""


def folder_name(identity: bytes, number: int) -> str:
    return f"{identity[:NAMING_BYTES].hex()}-{number}"


def is_ours(path: Path) -> bool:
    named = _NAME.fullmatch(path.name)
    if named is None or not _is_kind(path, stat.S_ISDIR) or not _is_kind(path / ABOUT, stat.S_ISREG):
        return False
    for kind in KINDS:
        raw = read_start(path / f"{kind}.index", HEADER.size)
        if len(raw) == HEADER.size:
            magic, _, _, identity = HEADER.unpack(raw)
            if magic == MAGIC and identity[:NAMING_BYTES].hex() == named[1]:
                return True
    return False


def stored(root: Path) -> Iterator[StoredTier]:
    """Every folder of the disk tier below `root`. Nothing is changed, and nothing is locked."""
    held = _held_locks()
    for path in _ours(root):
        about = read_about(path)
        entries = sum(_count(path / f"{kind}.index") for kind in KINDS)
        locked = _is_held(path / LOCK, held)
        yield StoredTier(path, about, allocated(path), entries, number_in(about, "used"), locked)


def remove(path: Path) -> bool:
    """Delete our files of a folder, unless a process uses it, or it may not be changed; whether they are gone."""
    try:
        lock = try_lock(path) if is_ours(path) else None
    except OSError:
        return False
    if lock is None:
        return False
    try:
        for name in OWN_FILES:
            with suppress(FileNotFoundError):
                (path / name).unlink()
        with suppress(OSError):  # somebody has put something else there
            path.rmdir()
    except OSError:
        return False
    finally:
        os.close(lock)
    return True


def others(root: Path, own: Collection[Path]) -> tuple[int, list[tuple[Path, int]]]:
    """The bytes that running processes have in other folders or may still take, and the folders that nobody uses, with
    their bytes: first those that were not used for the longest time. Only while `counting`."""
    taken, unused = 0, []
    for path in _ours(root):
        if path in own:
            continue
        about, nbytes = read_about(path), allocated(path)
        try:
            lock = try_lock(path)
        except OSError:  # it may not be changed
            lock = None
        if lock is None:
            taken += max(nbytes, int(number_in(about, "reserved")))
        else:
            os.close(lock)
            unused.append(((number_in(about, "turn"), number_in(about, "used")), path, nbytes))
    return taken, [(path, nbytes) for _, path, nbytes in sorted(unused)]


def next_turn(root: Path) -> int:
    """A number for each start, which tells the order of use whatever the clock says."""
    return 1 + max((int(number_in(read_about(path), "turn")) for path in _ours(root)), default=0)


def make_room(root: Path, own: Collection[Path], budget: int) -> int:
    """Delete folders that nobody uses, those first that were not used for the longest time, until all but `own` fit
    into `budget` bytes; the bytes that are left in them, or promised to other processes."""
    taken, unused = others(root, own)
    total = taken + sum(nbytes for _, nbytes in unused)
    for path, nbytes in unused:
        if total <= budget:
            break
        if remove(path):
            total -= nbytes
    return total


def claim(root: Path, identity: bytes, wanted: int) -> tuple[Path, int, int]:
    """The folder of this identity with the number `wanted`, or the first one that no other process uses: its path,
    number and lock."""
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        for number in (wanted, *range(MOST_FOLDERS)):
            path = root / folder_name(identity, number)
            path.mkdir(exist_ok=True, mode=0o700)
            if not _is_kind(path, stat.S_ISDIR):
                continue  # a link that somebody has put there
            if (lock := try_lock(path)) is not None:
                return path, number, lock
    except OSError as error:
        raise unusable(root, error) from error
    raise DiskUnusable(
        f"{MOST_FOLDERS} processes use the disk tier in {root} already; give another path.",
        f"{MOST_FOLDERS} other processes use its folder",
    )


def unusable(path: Path, error: OSError) -> DiskUnusable:
    why = error.strerror or str(error)
    if isinstance(error, BlockingIOError):
        why = "another process counts its files, and does not come to an end"
    return DiskUnusable(f"The disk tier cannot use {path}: {why}; give kv_disk another path.", why)


@contextmanager
def counting(root: Path, patience: float = COUNTING_SECONDS) -> Iterator[None]:
    """No other process counts, claims or deletes folders meanwhile. Raises OSError, or BlockingIOError after
    `patience` seconds."""
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle = open_private(root / COUNTING)
    try:
        until = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise
                time.sleep(0.005)
        yield
    finally:
        os.close(handle)


def try_lock(path: Path) -> int | None:
    """The lock of a folder of ours, if no process has it."""
    handle = open_private(path / LOCK)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Somebody may have deleted the folder between the two calls.
        if os.path.samestat(os.stat(path / LOCK, follow_symlinks=False), os.fstat(handle)):
            return handle
    except OSError:
        pass
    os.close(handle)
    return None


def allocated(path: Path) -> int:
    """Bytes that our files take on the disk."""
    return sum(_blocks(path / name) for name in OWN_FILES)


def _ours(root: Path) -> list[Path]:
    """Empty where the folder is not there or cannot be read."""
    try:
        return [path for path in sorted(root.iterdir()) if is_ours(path)]
    except OSError:
        return []


def _is_kind(path: Path, kind: Any) -> bool:
    try:
        return bool(kind(path.lstat().st_mode))
    except OSError:
        return False


def _blocks(path: Path) -> int:
    try:
        return path.lstat().st_blocks * 512
    except OSError:
        return 0


def _count(index: Path) -> int:
    try:
        size = index.lstat().st_size
    except OSError:
        return 0
    raw = read_start(index, size)[HEADER.size :]
    pieces = (raw[at : at + ENTRY.size] for at in range(0, len(raw) - ENTRY.size + 1, ENTRY.size))
    return sum(parse_entry(1, piece) is not None for piece in pieces)


def _held_locks() -> frozenset[int] | None:
    """The numbers of the files that processes have locked, as the kernel tells; None where it does not."""
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    matches = (re.search(r" FLOCK .* [0-9a-f]+:[0-9a-f]+:([0-9]+) ", line) for line in lines)
    return frozenset(int(one[1]) for one in matches if one is not None)


def _is_held(lock: Path, held: frozenset[int] | None) -> bool:
    if held is not None:
        try:
            return lock.lstat().st_ino in held
        except OSError:
            return False
    # A shared lock for an instant is the only way to ask: it is on a file that is open for reading.
    try:
        handle = os.open(lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(handle)
