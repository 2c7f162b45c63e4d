"""How far the thread that computes has come: for whoever must tell a slow step from one that hangs.

A step ticks with each of its layers, and with each block of scores. The count may lie in memory that another process
reads: it needs no message, and wakes nobody.
"""

from __future__ import annotations

import mmap
import os
import sys
from tempfile import TemporaryFile

BYTES = 8
_MOST = (1 << 64) - 1


class Progress:
    """Written by one thread; read by anybody."""

    def __init__(self) -> None:
        self._count = memoryview(bytearray(BYTES)).cast("Q")

    def share(self, file: int) -> None:
        """Count on in a file that others have mapped, too."""
        before, self._count = self._count[0], memoryview(mmap.mmap(file, BYTES)).cast("Q")
        self._count[0] = before

    def tick(self) -> None:
        self._count[0] = (self._count[0] + 1) & _MOST

    @property
    def count(self) -> int:
        return self._count[0]


PROGRESS = Progress()
"""Of the engine in this process."""


def watched_file() -> int:
    """A file without a name, for `Progress.share` in another process and `Watched` in this one."""
    try:
        file = os.memfd_create("bankfull-progress")
    except (AttributeError, OSError):  # not on this system
        with TemporaryFile() as made:
            file = os.dup(made.fileno())
    os.ftruncate(file, BYTES)
    return file


class Watched:
    """Another process' progress, by the file that it shares."""

    def __init__(self, file: int) -> None:
        self._memory = mmap.mmap(file, BYTES, prot=mmap.PROT_READ)

    @property
    def count(self) -> int:
        return int.from_bytes(self._memory[:BYTES], sys.byteorder)

    def close(self) -> None:
        self._memory.close()
