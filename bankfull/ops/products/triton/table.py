"""The fastest plan per linear layer as measured by `bankfull tune`, kept between runs.

A file is valid for one device type and the compiler versions that built its kernels; it is safe to delete. A measured
row count covers all smaller ones down to the next measured one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton

from bankfull.paths import cache_dir

log = logging.getLogger("bankfull")

FORMAT = 1
LARGEST_FILE = 1 << 22
LONGEST_NAME = 64
MAX_SIZE = 1 << 31
"""Upper bound for plausible rows, outputs and columns."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The fastest plan for a GEMM of (rows, inner) with (outer, inner)."""

    rows: int
    outer: int
    inner: int
    dtype: str
    plan: str


def lookup(rows: int, outer: int, inner: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """The plan's name; None if not measured. The caller must validate the name: the file may be older than the code."""
    return _find(rows, outer, inner, dtype, device)


def store(entries: Sequence[Entry], device: torch.device) -> Path:
    """Merge new entries into the file; new ones win. Raises OSError if it cannot be written."""
    known = {(e.rows, e.outer, e.inner, e.dtype): e for e in (*_load(device), *entries)}
    path = path_of(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"identity": identity(device), "linear": [asdict(entry) for entry in known.values()]}, indent=1)
    # Write to a temporary file, then rename: a reader never sees a partial file.
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
        file.write(text)
    os.replace(file.name, path)
    forget()
    return path


def forget() -> None:
    """Drop the caches, so that files are read again."""
    _find.cache_clear()
    _table.cache_clear()


def identity(device: torch.device) -> dict[str, Any]:
    """What the measurements depend on."""
    name = torch.cuda.get_device_properties(device).name if device.type == "cuda" else device.type
    return {"format": FORMAT, "device": name, "torch": torch.__version__, "triton": triton.__version__}


def path_of(device: torch.device) -> Path:
    digest = hashlib.sha256(json.dumps(identity(device), sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir() / f"linear-{digest}.json"


@cache
def _find(rows: int, outer: int, inner: int, dtype: torch.dtype, device: torch.device) -> str | None:
    entries = _table(device).get((outer, inner, str(dtype).removeprefix("torch.")))
    if entries is None:
        return None
    at = bisect_left(entries, (rows, ""))
    return entries[at][1] if at < len(entries) else None


@cache
def _table(device: torch.device) -> dict[tuple[int, int, str], list[tuple[int, str]]]:
    """Plans by shape and dtype, sorted by rows."""
    table: dict[tuple[int, int, str], list[tuple[int, str]]] = {}
    for entry in _load(device):
        table.setdefault((entry.outer, entry.inner, entry.dtype), []).append((entry.rows, entry.plan))
    return {key: sorted(plans) for key, plans in table.items()}


def _load(device: torch.device) -> list[Entry]:
    path = path_of(device)
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise ValueError("it is too large")
        return _checked(json.loads(path.read_bytes()), identity(device))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as problem:
        log.warning(f"{path} is not used: {str(problem)[:100]}; run `bankfull tune` to rewrite it.")
        return []


def _checked(stored: Any, expected: dict[str, Any]) -> list[Entry]:
    if not isinstance(stored, dict) or stored.get("identity") != expected:
        raise ValueError("it was written for another device or version")
    entries = stored.get("linear")
    if not isinstance(entries, list):
        raise ValueError("it has no list of plans")
    return [_entry(one) for one in entries]


def _entry(stored: Any) -> Entry:
    names = ("rows", "outer", "inner"), ("dtype", "plan")
    if not isinstance(stored, dict) or set(stored) != {*names[0], *names[1]}:
        raise ValueError("an entry has missing or unknown fields")
    numbers, words = ([stored[name] for name in group] for group in names)
    if not all(type(number) is int and 0 < number < MAX_SIZE for number in numbers):
        raise ValueError("an entry has an invalid size")
    if not all(isinstance(word, str) and 0 < len(word) <= LONGEST_NAME for word in words):
        raise ValueError("an entry has an invalid name")
    return Entry(*numbers, *words)
