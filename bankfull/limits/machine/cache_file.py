"""JSON files in the cache folder for measurements of one machine or device, keyed by its identity."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

from bankfull.paths import cache_dir

LARGEST_FILE = 1 << 16
"""Bytes above which a cache file is ignored as damaged."""


def path_of(identity: dict[str, Any], what: str = "ceilings") -> Path:
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir() / f"{what}-{digest}.json"


def read(path: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """The content of the cache file of that machine if it can be read; the caller validates it."""
    try:
        if path.stat().st_size > LARGEST_FILE:
            return None
        stored = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return stored if isinstance(stored, dict) and stored.get("machine") == identity else None


def write(path: Path, identity: dict[str, Any], **found: Any) -> None:
    text = json.dumps({"machine": identity, **found}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Write a temporary file, then rename it: readers see the old file or the new one, never a part.
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError as error:
        why = error.strerror or error
        warnings.warn(f"The measurement could not be saved to {path}: {why}", stacklevel=3)
