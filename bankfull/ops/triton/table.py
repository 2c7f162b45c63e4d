"""Which way of computing a linear layer was fastest here: what `bankfull tune` measured, kept between runs.

A file belongs to one kind of device and to the versions of the compilers that made its kernels; there is no harm in
losing it. A measured number of rows stands for all smaller ones down to the next.
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
MOST = 1 << 31
"""A bound on rows, outputs and columns that anybody believes."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The fastest plan for a product of (rows, inner) with (outer, inner)."""

    rows: int
    outer: int
    inner: int
    dtype: str
    plan: str


def lookup(rows: int, outer: int, inner: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """The name of the plan; None where nothing was measured. Whoever asks must know the name: the file may be older."""
    return _find(rows, outer, inner, dtype, device)


def store(entries: Sequence[Entry], device: torch.device) -> Path:
    """Join what was measured with what is known, the newer counts. OSError where it cannot be written."""
    known = {(e.rows, e.outer, e.inner, e.dtype): e for e in (*_load(device), *entries)}
    path = path_of(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"identity": identity(device), "linear": [asdict(entry) for entry in known.values()]}, indent=1)
    # Written whole under another name, then renamed: a reader sees the old file or the new one, never a part.
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
        file.write(text)
    os.replace(file.name, path)
    forget()
    return path


def forget() -> None:
    """Read the files again when they are next asked for."""
    _find.cache_clear()
    _table.cache_clear()


def identity(device: torch.device) -> dict[str, Any]:
    """What the figures depend on."""
    name = torch.cuda.get_device_properties(device).name if device.type == "cuda" else device.type
    return {"format": FORMAT, "device": name, "torch": torch.__version__, "triton": triton.__version__}


def path_of(device: torch.device) -> Path:
    digest = hashlib.sha256(json.dumps(identity(device), sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir() / f"linear-{digest}.json"


@cache
def _find(rows: int, outer: int, inner: int, dtype: torch.dtype, device: torch.device) -> str | None:
    found = _table(device).get((outer, inner, str(dtype).removeprefix("torch.")))
    if found is None:
        return None
    at = bisect_left(found, (rows, ""))
    return found[at][1] if at < len(found) else None


@cache
def _table(device: torch.device) -> dict[tuple[int, int, str], list[tuple[int, str]]]:
    """By shape and dtype: plans in the order of their rows."""
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
        log.warning(f"{path} is not used: {str(problem)[:100]}; `bankfull tune` writes it anew.")
        return []


def _checked(stored: Any, expected: dict[str, Any]) -> list[Entry]:
    if not isinstance(stored, dict) or stored.get("identity") != expected:
        raise ValueError("it was made for another device or another version")
    entries = stored.get("linear")
    if not isinstance(entries, list):
        raise ValueError("it holds no list of plans")
    return [_entry(one) for one in entries]


def _entry(stored: Any) -> Entry:
    names = ("rows", "outer", "inner"), ("dtype", "plan")
    if not isinstance(stored, dict) or set(stored) != {*names[0], *names[1]}:
        raise ValueError("an entry lacks a field, or has one too many")
    numbers, words = ([stored[name] for name in group] for group in names)
    if not all(type(number) is int and 0 < number < MOST for number in numbers):
        raise ValueError("an entry has a size that is none")
    if not all(isinstance(word, str) and 0 < len(word) <= LONGEST_NAME for word in words):
        raise ValueError("an entry has a name that is none")
    return Entry(*numbers, *words)
