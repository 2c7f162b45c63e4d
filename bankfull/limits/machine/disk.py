"""Read bandwidth of a disk: the bound on loading a model for the first time.

Writes a file of random bytes, flushes it, and reads it back in large pieces with several threads, past the page cache
where the file system allows. A virtual disk may still answer from its host's memory.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

WRITTEN = 256 << 20
PIECE = 4 << 20
AT_ONCE = 4
SECONDS_TO_WRITE = 3.0
FREE_TIMES = 4
"""Free space required, in multiples of the test file."""
DIRECT, DROPPED = "direct reads", "reads after dropping the page cache"
MOST_PASSES, SECONDS_TO_READ = 3, 2.0


@dataclass(frozen=True, slots=True)
class Disk:
    bytes_per_s: float
    read_bytes: int
    how: str


def read_rate(folder: Path, size: int = WRITTEN) -> Disk | None:
    """Bandwidth of the disk that holds `folder`; None if the folder is not writable or has too little free space."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(folder).free < FREE_TIMES * size:
            return None
        with tempfile.NamedTemporaryFile(dir=folder, prefix="disk-", suffix=".tmp") as file:
            written = _fill(file.fileno(), size)
            return _best(Path(file.name), written)
    except OSError:
        return None


def _fill(file: int, size: int) -> int:
    """Write and fsync whole pieces until `size` or the time limit, at least one; returns the bytes written."""
    start, written = perf_counter(), 0
    while written < size and (written == 0 or perf_counter() - start < SECONDS_TO_WRITE):
        piece = memoryview(os.urandom(PIECE))
        while piece:
            piece = piece[os.write(file, piece) :]
        written += PIECE
        os.fsync(file)
    return written


def _best(path: Path, size: int) -> Disk:
    """Direct reads: the best of a few passes. Through the page cache only the first pass counts."""
    if hasattr(os, "O_DIRECT"):
        with suppress(OSError):  # some file systems have no direct reads
            seconds, start = _seconds(path, size, os.O_DIRECT), perf_counter()
            for _ in range(MOST_PASSES - 1):
                if perf_counter() - start < SECONDS_TO_READ:
                    seconds = min(seconds, _seconds(path, size, os.O_DIRECT))
            return Disk(size / seconds, size, DIRECT)
    return Disk(size / _seconds(path, size, 0), size, DROPPED)


def _seconds(path: Path, size: int, flags: int) -> float:
    file = os.open(path, os.O_RDONLY | flags)
    try:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, 0, size, os.POSIX_FADV_DONTNEED)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            begin = perf_counter()
            list(pool.map(lambda worker: _read_share(file, size, worker), range(AT_ONCE)))
            return max(perf_counter() - begin, 1e-9)
    finally:
        os.close(file)


def _read_share(file: int, size: int, worker: int) -> None:
    with mmap.mmap(-1, PIECE) as buffer:  # direct reads need page-aligned memory
        for offset in range(worker * PIECE, size, AT_ONCE * PIECE):
            if os.preadv(file, [buffer], offset) != PIECE:
                raise OSError("the file became shorter")
