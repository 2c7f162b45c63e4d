"""A progress counter of the computing thread, for a watchdog that distinguishes a slow step from a hang.

A step ticks with each of its layers, and with each block of prompt logprobs. The counter may lie in memory that another
process reads, so a tick sends no message.
"""

from __future__ import annotations

import mmap
import os
import sys
from tempfile import TemporaryFile

BYTES = 8
_MOST = (1 << 64) - 1


class Progress:
    """Written by one thread, read by any."""

    def __init__(self) -> None:
        self._count = memoryview(bytearray(BYTES)).cast("Q")

    def share(self, file: int) -> None:
        """Continue counting in a file that other processes have mapped."""
        before, self._count = self._count[0], memoryview(mmap.mmap(file, BYTES)).cast("Q")
        self._count[0] = before

    def tick(self) -> None:
        self._count[0] = (self._count[0] + 1) & _MOST

    @property
    def count(self) -> int:
        return self._count[0]


PROGRESS = Progress()
"""The counter of the engine in this process."""


def watched_file() -> int:
    """An unnamed file, for `Progress.share` in the engine's process and `SharedProgress` in this one."""
    try:
        file = os.memfd_create("bankfull-progress")
    except (AttributeError, OSError):  # not on this system
        with TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    os.ftruncate(file, BYTES)
    return file


class SharedProgress:
    """The progress of another process, read from the file that it shares."""

    def __init__(self, file: int) -> None:
        self._memory = mmap.mmap(file, BYTES, prot=mmap.PROT_READ)

    @property
    def count(self) -> int:
        return int.from_bytes(self._memory[:BYTES], sys.byteorder)

    def close(self) -> None:
        self._memory.close()
