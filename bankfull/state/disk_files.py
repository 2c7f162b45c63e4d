"""The files of a folder of the disk tier: their names, the form of the index, and how they are opened and written."""

from __future__ import annotations

import json
import os
import stat
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAGIC = b"bankfull KV v01\0"
HEADER = struct.Struct("<16sQQ32s")
"""Magic, bytes of a place, bytes of an entry, identity."""
ENTRY = struct.Struct("<QdQI48sI")
"""Stamp, time of writing, bytes, checksum of the content, length and bytes of the key, checksum of the entry."""
MOST_KEY = 47
KINDS = ("pages", "slots")
ABOUT, LOCK = "about.json", "lock"
OWN_FILES = (*(f"{kind}.{part}" for kind in KINDS for part in ("data", "index")), "about.new", ABOUT, LOCK)
"""All that this program ever makes in a folder, in the order in which it is deleted."""
MOST_ABOUT = 1 << 20
BLOCK = 4096
FOLDER_BYTES = BLOCK * (len(OWN_FILES) + 1)
"""What a folder takes beside its places: the ends of its files, and itself."""


@dataclass(frozen=True, slots=True)
class PlaceEntry:
    place: int
    key: bytes
    stamp: int
    written: float
    nbytes: int
    checksum: int


def packed_entry(entry: PlaceEntry) -> bytes:
    key = bytes((len(entry.key),)) + entry.key
    head = ENTRY.pack(entry.stamp, entry.written, entry.nbytes, entry.checksum, key, 0)
    return head[:-4] + zlib.crc32(head[:-4]).to_bytes(4, "little")


def parse_entry(place: int, raw: bytes) -> PlaceEntry | None:
    """None for an empty or damaged entry."""
    stamp, written, nbytes, checksum, key, entry_crc = ENTRY.unpack(raw)
    if not stamp or entry_crc != zlib.crc32(raw[:-4]) or key[0] > MOST_KEY:
        return None
    return PlaceEntry(place, key[1 : 1 + key[0]], stamp, written, nbytes, checksum)


def open_private(path: Path) -> int:
    """A file that only this user may read; never through a symbolic link."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(f"{path.name} is not a regular file")
        os.fchmod(handle, 0o600)
    except OSError:
        os.close(handle)
        raise
    return handle


def read_start(path: Path, most: int) -> bytes:
    """The first bytes of a regular file; empty if there is none, or it cannot be read."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        return os.pread(handle, most, 0) if stat.S_ISREG(os.fstat(handle).st_mode) else b""
    except OSError:
        return b""
    finally:
        os.close(handle)


def write_all(handle: int, content: bytes | memoryview, at: int) -> None:
    done, view = 0, memoryview(content)
    while done < len(view):
        done += os.pwrite(handle, view[done:], at + done)


def write_about(folder: Path, about: dict[str, Any]) -> None:
    """The description of a folder. Whoever reads it finds the old one or the new one."""
    other = folder / "about.new"
    handle = open_private(other)
    try:
        os.ftruncate(handle, 0)
        write_all(handle, json.dumps(about, indent=1).encode(), 0)
    finally:
        os.close(handle)
    other.replace(folder / ABOUT)


def read_about(folder: Path) -> dict[str, Any]:
    """Empty if it is damaged."""
    try:
        about = json.loads(read_start(folder / ABOUT, MOST_ABOUT))
    except ValueError:
        return {}
    return about if isinstance(about, dict) else {}


def number_in(about: dict[str, Any], name: str) -> float:
    """0 if there is no such number."""
    value = about.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0
