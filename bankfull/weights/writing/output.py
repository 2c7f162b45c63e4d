"""A folder of files whose layout is known before their content: tensors arrive in any order, and an interrupted writer
continues where it stopped.

The files are made beside the target, in `.NAME.partial`, which is renamed when all tensors are there. A journal in it
lists the tensors whose bytes are on the disk. Its first line identifies what is written: the layout, the source and the
recipe; and the build that writes it. A folder with another recipe is discarded, one of another build is refused: what
two builds have computed does not go into one model, and only the user may throw away hours of work.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from bankfull.build_digest import build_digest
from bankfull.durable import fsync_all, fsync_folder
from bankfull.errors import ConfigError

JOURNAL = "journal"
SYNC_BYTES = 256 << 20
"""Bytes after which the journal is written: what an interruption may cost."""
_FIRST_LINE = re.compile(r"[0-9a-f]{64}( \S+)?")
SPARE_BYTES = 32 << 20
"""Room for the tokenizer and the configuration."""

Advance = Callable[[int], None]
"""Told the number of bytes of each tensor that is on the disk."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor's bytes are in its file."""

    name: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class PlannedFile:
    name: str
    head: bytes
    places: tuple[Place, ...]

    @property
    def nbytes(self) -> int:
        return max((place.offset + place.nbytes for place in self.places), default=len(self.head))


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor on the CPU, without a copy."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


class OutputFolder:
    """Files that are being written."""

    def __init__(self, partial: Path, files: Sequence[PlannedFile], journal: IO[str], done: set[str]) -> None:
        self.path = partial
        self._files = {file.name: file for file in files}
        self._places = {place.name: (file.name, place) for file in files for place in file.places}
        self._journal, self._done = journal, done
        self._unsynced: list[str] = []
        self._unsynced_bytes = 0
        self._open: dict[str, IO[bytes]] = {}

    def lacks(self, name: str) -> bool:
        """Whether the tensor of this name is still to be written."""
        return name not in self._done

    @property
    def resumed_bytes(self) -> int:
        return sum(place.nbytes for name, (_, place) in self._places.items() if name in self._done)

    def put(self, name: str, tensor: Tensor) -> int:
        """Write a tensor to its place; the number of its bytes."""
        file, place = self._places[name]
        data = raw_bytes(tensor.cpu())
        assert len(data) == place.nbytes, (name, len(data), place.nbytes)
        opened = self._opened(file)
        opened.seek(place.offset)
        opened.write(data)
        self._done.add(name)
        self._unsynced.append(name)
        self._unsynced_bytes += place.nbytes
        if self._unsynced_bytes >= SYNC_BYTES:
            self.sync()
        return place.nbytes

    def sync(self) -> None:
        """Put everything so far onto the disk, then into the journal."""
        for opened in self._open.values():
            opened.flush()
            os.fsync(opened.fileno())
        self._journal.writelines(f"{name}\n" for name in self._unsynced)
        self._journal.flush()
        os.fsync(self._journal.fileno())
        self._unsynced, self._unsynced_bytes = [], 0

    def close(self) -> None:
        if self._unsynced:
            self.sync()
        for opened in self._open.values():
            opened.close()

    def whole(self) -> None:
        """Fails unless every tensor is there."""
        missing = [name for name in self._places if self.lacks(name)]
        assert not missing, f"never written: {missing[:3]}"

    def _opened(self, name: str) -> IO[bytes]:
        if name not in self._open:
            path, planned = self.path / name, self._files[name]
            opened = path.open("r+b" if path.exists() else "w+b")
            if os.fstat(opened.fileno()).st_size != planned.nbytes:
                opened.truncate(planned.nbytes)
            opened.write(planned.head)
            self._open[name] = opened
        return self._open[name]


@contextmanager
def output_folder(target: Path, files: Sequence[PlannedFile], identity: str) -> Iterator[OutputFolder]:
    """The folder for these files, which becomes `target` at the end of the block. After an error what is complete stays
    for the next attempt with the same `identity`."""
    need = sum(file.nbytes for file in files)
    partial = target.with_name(f".{target.name}.partial")
    first = _digest(files, identity)
    try:
        refuse_existing(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        done = _resumable(partial, files, first)
        have = sum(place.nbytes for file in files for place in file.places if place.name in done)
        if (free := shutil.disk_usage(target.parent).free) < need - have + SPARE_BYTES:
            raise ConfigError(
                f"The model needs {(need - have) / 1e9:.1f} GB in {target.parent}, but {free / 1e9:.1f} GB are free; "
                "make room, or choose another directory."
            )
        with (partial / JOURNAL).open("a") as journal:
            _lock(journal, target)
            if not done:
                journal.truncate(0)
                journal.write(f"{first}\n")
                journal.flush()
            folder = OutputFolder(partial, files, journal, done)
            try:
                for file in files:
                    folder._opened(file.name)
                yield folder
                folder.whole()
            finally:
                folder.close()
        # Nobody may find the folder under its name before all of it is on the disk, also after a power cut.
        fsync_all(partial)
        (partial / JOURNAL).unlink()
        fsync_folder(partial)
        if target.exists():
            target.rmdir()
        os.replace(partial, target)
        fsync_folder(target.parent)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror or error}; choose another directory.") from None


def discard(target: Path) -> None:
    """Delete what an interrupted writer has left."""
    shutil.rmtree(target.with_name(f".{target.name}.partial"), ignore_errors=True)


def refuse_existing(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists already; delete it, or choose another directory.")


def _digest(files: Sequence[PlannedFile], identity: str) -> str:
    digest = hashlib.sha256(identity.encode())
    for file in files:
        digest.update(repr((file.name, len(file.head), file.places)).encode() + file.head)
    return f"{digest.hexdigest()} {build_digest()}"


def _resumable(partial: Path, files: Sequence[PlannedFile], first: str) -> set[str]:
    """Names of the tensors that are complete; a folder of something else is emptied."""
    lines: list[str] = []
    with suppress(OSError, UnicodeDecodeError):
        lines = (partial / JOURNAL).read_text().splitlines()
    if lines[:1] and first not in lines[:1] and not _same_build(lines[0], first):
        raise ConfigError(
            f"{partial} was begun by another build of bankfull: finish it there, or delete it to begin anew."
        )
    sizes_fit = all((partial / file.name).is_file() for file in files) and all(
        (partial / file.name).stat().st_size == file.nbytes for file in files
    )
    if lines[:1] == [first] and sizes_fit:
        known = {place.name for file in files for place in file.places}
        return known.intersection(lines[1:])
    _refuse_running(partial)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return set()


def _same_build(found: str, first: str) -> bool:
    """Builds up to November 2026 wrote the recipe alone."""
    return _FIRST_LINE.fullmatch(found) is None or found.partition(" ")[2] == first.partition(" ")[2]


def _refuse_running(partial: Path) -> None:
    """Another process may be writing to the same folder."""
    with suppress(FileNotFoundError), (partial / JOURNAL).open("a") as journal:
        _lock(journal, partial)


def _lock(journal: IO[str], target: Path) -> None:
    try:
        fcntl.flock(journal.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"{target} is being written by another process; wait for it, or choose another directory."
        ) from None
