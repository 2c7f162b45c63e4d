"""The program's directories: cache (measurements, which may be lost), data (files and batches) and configuration."""

from __future__ import annotations

import os
from pathlib import Path

from bankfull.errors import ConfigError

CACHE_VARIABLE = "BANKFULL_CACHE"
DATA_VARIABLE = "BANKFULL_DATA"
CONFIG_VARIABLE = "BANKFULL_CONFIG"


def cache_dir() -> Path:
    """BANKFULL_CACHE, or `bankfull` in the user's cache directory. It may not exist yet."""
    return _own(CACHE_VARIABLE, "XDG_CACHE_HOME", ".cache", "cached data")


def data_dir() -> Path:
    """BANKFULL_DATA, or `bankfull` in the user's data directory. It may not exist yet."""
    return _own(DATA_VARIABLE, "XDG_DATA_HOME", ".local/share", "files and batches")


def config_dir() -> Path:
    """BANKFULL_CONFIG, or `bankfull` in the user's configuration directory. It may not exist."""
    return _own(CONFIG_VARIABLE, "XDG_CONFIG_HOME", ".config", "configuration")


def _own(variable: str, shared_variable: str, usual: str, what: str) -> Path:
    given = os.environ.get(variable, "")
    if given:
        return Path(given)
    shared = os.environ.get(shared_variable, "")
    # The XDG Base Directory Specification says that a relative path is invalid and must be ignored.
    if os.path.isabs(shared):
        return Path(shared) / "bankfull"
    try:
        return Path.home() / usual / "bankfull"
    except RuntimeError:
        raise ConfigError(f"No home directory is known; set {variable} to a directory for {what}.") from None
