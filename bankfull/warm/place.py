"""Where the warm process of this user and this installation listens."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
from pathlib import Path

from bankfull.errors import ConfigError
from bankfull.paths import cache_dir

LONGEST = 100
"""Bytes of a socket's path that every system takes."""


def socket_path() -> Path:
    """Raises ConfigError where no directory is known, or its path is too long."""
    shared = os.environ.get("XDG_RUNTIME_DIR", "")
    folder = Path(shared) / "bankfull" if os.path.isabs(shared) else cache_dir() / "warm"
    installed = f"{sys.executable}\0{Path(__file__).parents[1]}\0{sys.version}"
    path = folder / f"{hashlib.sha256(installed.encode()).hexdigest()[:16]}.sock"
    if len(os.fsencode(path)) > LONGEST:
        raise ConfigError(
            f"{folder} is too long a path for a socket; set XDG_RUNTIME_DIR to a directory with a shorter one."
        )
    return path


def is_own(folder: Path) -> bool:
    """Whether a directory belongs to this user, and nobody else may enter it."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
