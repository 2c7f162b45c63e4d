"""Digests of the whole content of large files, each computed once.

A digest is kept in the cache directory beside all that the file system says of the file. It holds as long as that is
the same: size, inode, and the times of the last change of the content and of the inode, which nobody can set back. A
file that has changed a moment ago is hashed again the next time, because it may change again within the same tick of
the file system's clock. Where the cache directory cannot be written, files are hashed every time.

The digest is a tree: SHA-256 of pieces, which several threads read and hash, and SHA-256 of those.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkstemp

from bankfull.errors import ConfigError, ModelError
from bankfull.paths import cache_dir

log = logging.getLogger("bankfull")

PIECE = 8 << 20
READ = 1 << 20
"""Bytes that are read and hashed at once: they stay in the processor's cache in between."""
KEPT_BYTES = 4 << 20
"""A smaller file is hashed each time: that is as fast as looking."""
MOST_THREADS = 8
"""More do not read faster from any disk that was measured, and the model is loaded at the same time."""
TICK_SECONDS = 2.0
"""The coarsest clock of a file system in use."""
FORMAT = 1


@dataclass(frozen=True, slots=True)
class FileState:
    """What the file system says of a file; equal as long as its content is, except within a tick of its clock."""

    size: int
    modified: int
    changed: int
    """`modified` and `changed` are times in nanoseconds."""
    inode: int
    device: int

    @staticmethod
    def of(handle: int | Path) -> FileState:
        status = os.stat(handle)
        return FileState(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev)

    @property
    def is_settled(self) -> bool:
        """Whether a later change would show."""
        return time.time_ns() - max(self.modified, self.changed) > TICK_SECONDS * 1e9


def file_digest(path: Path) -> bytes:
    """The digest of the whole content. Raises OSError, or ModelError if the file changes meanwhile."""
    path = path.resolve()
    state = FileState.of(path)
    if state.size < KEPT_BYTES:
        return hashlib.sha256(path.read_bytes()).digest()
    record = _record(path)
    if record is not None and (known := _read(record, path, state)) is not None:
        return known
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        digest = _hashed(handle, state.size)
        if FileState.of(handle) != state or FileState.of(path) != state:
            raise ModelError(f"{path.name} has changed while it was read; try again when it is complete.")
    finally:
        os.close(handle)
    if record is not None and state.is_settled:
        _write(record, path, state, digest)
    return digest


def known_digest(path: Path) -> bytes | None:
    """The digest if it is known without reading a large file. Raises OSError."""
    path = path.resolve()
    state = FileState.of(path)
    if state.size < KEPT_BYTES:
        return file_digest(path)
    record = _record(path)
    return None if record is None else _read(record, path, state)


def _record(path: Path) -> Path | None:
    """Where the digest of this file is kept. None: no directory is known."""
    with suppress(ConfigError):
        return cache_dir() / "digests" / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json"
    return None


def _hashed(handle: int, size: int) -> bytes:
    starts = range(0, size, PIECE)
    threads = max(1, min(MOST_THREADS, _cores(), len(starts)))

    def digest_at(start: int) -> bytes:
        return _piece(handle, start, min(size, start + PIECE))

    with ThreadPoolExecutor(threads, "bankfull-digest") as pool:
        try:
            pieces = pool.map(digest_at, starts)
        except RuntimeError:  # the interpreter ends: no thread can begin any more
            pieces = map(digest_at, starts)
        whole = hashlib.sha256(size.to_bytes(8, "little"))
        for piece in pieces:
            whole.update(piece)
    return whole.digest()


def _piece(handle: int, start: int, end: int) -> bytes:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(min(READ, end - start)))
    while start < end:
        count = os.preadv(handle, [buffer[: end - start]], start)
        if not count:
            raise OSError("the file has become shorter")
        digest.update(buffer[:count])
        start += count
    return digest.digest()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _facts(path: Path, state: FileState) -> Sequence[object]:
    return [FORMAT, os.fsdecode(path), state.size, state.modified, state.changed, state.inode, state.device]


def _read(record: Path, path: Path, state: FileState) -> bytes | None:
    try:
        facts, digest = json.loads(record.read_bytes())
        known = bytes.fromhex(digest)
    except (OSError, ValueError, TypeError):
        return None
    return known if facts == _facts(path, state) and len(known) == hashlib.sha256().digest_size else None


def _write(record: Path, path: Path, state: FileState, made: bytes) -> None:
    """Whoever reads it finds all of it, or what was there before, whenever the process or the machine ends."""
    unnamed = None
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        handle, unnamed = mkstemp(dir=record.parent, prefix=".new-")
        with os.fdopen(handle, "wb") as file:
            file.write(json.dumps([_facts(path, state), made.hex()]).encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(unnamed, record)
    except OSError as error:
        log.warning("the digest of %s cannot be kept (%s); it is hashed at each start.", path.name, error.strerror)
        if unnamed is not None:
            with suppress(OSError):
                os.unlink(unnamed)
