"""A disk that loses power: the state that a trace of changes leaves when it is cut at any point.

Until a file is fsynced, each of its writes may be present, missing, or torn at a sector boundary. Until a folder is
fsynced, any prefix of the changes to its names may be present. The model assumes nothing else; most file systems
guarantee more.
"""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HEAD = struct.Struct("<cQQII")
SECTOR = 512


@dataclass(frozen=True, slots=True)
class Change:
    kind: str
    inode: int
    offset: int
    first: bytes
    second: bytes


def read_trace(path: Path) -> list[Change]:
    data, at, found = path.read_bytes(), 0, []
    while at < len(data):
        kind, inode, offset, *lengths = HEAD.unpack_from(data, at)
        at += HEAD.size
        middle, end = at + lengths[0], at + sum(lengths)
        found.append(Change(kind.decode(), inode, offset, data[at:middle], data[middle:end]))
        at = end
    assert at == len(data), "incomplete record"
    return found


def write_acknowledgement(trace: int, **what: Any) -> None:
    """Append an acknowledgement to the trace."""
    text = json.dumps(what).encode()
    os.write(trace, HEAD.pack(b"A", 0, 0, len(text), 0) + text)


@dataclass(slots=True, eq=False)
class File:
    safe: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)
    """Unsynced writes as (offset, data); None truncates the file at the offset."""

    def sync(self) -> None:
        for offset, data in self.pending:
            _apply(self.safe, offset, data)
        self.pending.clear()


@dataclass(slots=True, eq=False)
class Folder:
    safe: dict[str, File | Folder] = field(default_factory=dict)
    pending: list[tuple[str, File | Folder | None]] = field(default_factory=list)
    """Unsynced changes as (name, new node); None removes the name."""

    def now(self, count: int | None = None) -> dict[str, File | Folder]:
        """The names after the first `count` pending changes, or after all."""
        names = dict(self.safe)
        for name, node in self.pending[:count]:
            if node is None:
                names.pop(name, None)
            else:
                names[name] = node
        return names

    def sync(self) -> None:
        self.safe = self.now()
        self.pending.clear()


class Disk:
    """The folder `root` of the trace; it starts empty and durable."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.top = Folder()
        self._files: dict[int, File] = {}

    def change(self, change: Change) -> None:
        match change.kind:
            case "C":
                self._files[change.inode] = file = File()
                self._name(change.first, file)
            case "M":
                self._name(change.first, Folder())
            case "W":
                self._files[change.inode].pending.append((change.offset, change.first))
            case "T":
                self._files[change.inode].pending.append((change.offset, None))
            case "S":
                self._files[change.inode].sync()
            case "D":
                folder = self._found(change.first)
                assert isinstance(folder, Folder)
                folder.sync()
            case "R":
                node = self._found(change.first)
                self._name(change.second, node)
                self._name(change.first, None)
            case "U":
                self._name(change.first, None)
            case "A":
                pass
            case _:
                raise AssertionError(change.kind)

    def _parts(self, path: bytes) -> tuple[str, ...]:
        return Path(path.decode()).relative_to(self._root).parts

    def _found(self, path: bytes) -> File | Folder:
        node: File | Folder = self.top
        for part in self._parts(path):
            assert isinstance(node, Folder)
            node = node.now()[part]
        return node

    def _name(self, path: bytes, node: File | Folder | None) -> None:
        *above, name = self._parts(path)
        folder = self.top
        for part in above:
            below = folder.now()[part]
            assert isinstance(below, Folder)
            folder = below
        folder.pending.append((name, node))

    def leave(self, place: Path, chance: random.Random | None, kept: bool = False) -> None:
        """Write the state after the power cut to `place`. `kept` keeps all unsynced changes, `chance` a random part of
        them; otherwise they are lost."""
        _leave(self.top, place, chance, kept)


def _leave(folder: Folder, place: Path, chance: random.Random | None, kept: bool) -> None:
    count = chance.randint(0, len(folder.pending)) if chance is not None else len(folder.pending) if kept else 0
    place.mkdir()
    for name, node in folder.now(count).items():
        if isinstance(node, Folder):
            _leave(node, place / name, chance, kept)
        elif not name.endswith("-shm"):  # shared memory: a start creates it again
            (place / name).write_bytes(_left(node, chance, kept))


def _left(file: File, chance: random.Random | None, kept: bool) -> bytes:
    data = bytearray(file.safe)
    for offset, written in file.pending:
        if kept or (chance is not None and chance.random() < 0.5):
            if chance is not None and written is not None and chance.random() < 0.25:
                border = (offset + chance.randrange(len(written))) // SECTOR * SECTOR
                written = written[: max(0, border - offset)]
            _apply(data, offset, written)
    return bytes(data)


def _apply(data: bytearray, offset: int, written: bytes | None) -> None:
    if written is None:
        del data[offset:]
    if len(data) < offset:
        data.extend(bytes(offset - len(data)))
    if written is not None:
        data[offset : offset + len(written)] = written


def cuts(trace: list[Change], root: Path) -> Iterator[tuple[int, Disk, list[Any]]]:
    """Before every change and after the last: its number, the disk, and the acknowledgements so far."""
    disk, acknowledged = Disk(root), []
    for number, change in enumerate(trace):
        yield number, disk, acknowledged
        disk.change(change)
        if change.kind == "A":
            acknowledged.append(json.loads(change.first))
    yield len(trace), disk, acknowledged
