"""What processes use of the machine, read from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(group: int) -> float:
    """Of all processes of a process group that are alive."""
    return sum(int(fields[11]) + int(fields[12]) for fields in _members(group)) / TICKS


def resident_bytes(group: int) -> int:
    return sum(int(fields[21]) for fields in _members(group)) * PAGE


def busy_seconds() -> float:
    """Of all cores, whoever used them; what a hypervisor gave to others counts too."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split(None, 9)[1:9])
    return (user + nice + system + irq + softirq + steal) / TICKS


def _members(group: int) -> Iterator[list[str]]:
    """The fields of /proc/PID/stat behind the name: state first, then the parent, then the group."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # ended meanwhile
        if int(fields[2]) == group:
            yield fields
