"""What is written survives a power cut only if it is told to the disk: each file, and the folder that names it."""

from __future__ import annotations

import os
from pathlib import Path


def fsync_folder(folder: Path) -> None:
    """The names in it."""
    _fsync(folder, os.O_RDONLY | os.O_DIRECTORY)


def fsync_all(folder: Path) -> None:
    """All files in it and below, and their names."""
    for where, _, files in os.walk(folder, topdown=False):
        for name in files:
            _fsync(Path(where, name), os.O_RDONLY)
        fsync_folder(Path(where))


def _fsync(path: Path, how: int) -> None:
    handle = os.open(path, how | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
