"""Folders for sockets and temporary files of a server. They end with it, also if it is killed.

A process that is killed removes nothing. Each folder therefore holds a file that its process keeps locked: the kernel
releases the lock however the process ends, and the next one that needs a folder removes those without a lock.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "bankfull-"
LOCK = ".owner"


class ScratchFolder:
    """A new folder that only this user can enter, until `close`."""

    def __init__(self, purpose: str, within: Path | None = None) -> None:
        """`purpose` is part of its name. `within`: the folder for temporary files if it is None."""
        within = Path(tempfile.gettempdir()) if within is None else within
        remove_abandoned(within)
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{purpose}-", dir=within))
        # Under its name the file is always locked: otherwise another process could take the folder for abandoned.
        unnamed = self.path / f"{LOCK}.new"
        self._lock = unnamed.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unnamed.rename(self.path / LOCK)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *how: object) -> None:
        self.close()


def remove_abandoned(within: Path | None = None) -> None:
    """Remove the folders of this user whose processes were killed."""
    within = Path(tempfile.gettempdir()) if within is None else within
    for lock in within.glob(f"{PREFIX}*/{LOCK}"):
        with suppress(OSError):  # it is locked, or was removed meanwhile
            if _owned(lock.parent):
                with lock.open() as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(lock.parent, ignore_errors=True)


def _owned(folder: Path) -> bool:
    """Whether it is a folder of this user. Others may write links into the folder for temporary files."""
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
