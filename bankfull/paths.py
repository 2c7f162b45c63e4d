"""Where the program keeps what it may lose: measurements, never anything that a user made."""

from __future__ import annotations

import os
from pathlib import Path

from bankfull.errors import ConfigError

CACHE_VARIABLE = "BANKFULL_CACHE"


def cache_dir() -> Path:
    """BANKFULL_CACHE, or `bankfull` in the user's cache directory. It may not exist yet."""
    own = os.environ.get(CACHE_VARIABLE, "")
    if own:
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME", "")
    # A relative path there is invalid and to be ignored (XDG Base Directory Specification).
    if os.path.isabs(shared):
        return Path(shared) / "bankfull"
    try:
        return Path.home() / ".cache" / "bankfull"
    except RuntimeError:
        raise ConfigError(f"No home directory is known; set {CACHE_VARIABLE} to a directory for cached data.") from None
