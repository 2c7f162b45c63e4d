"""What processes use of the machine, read from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Member:
    """A process, as it was a moment ago."""

    id: int
    parent: int
    group: int
    state: str
    """One letter: R runs, S sleeps, T is stopped, Z has ended, ..."""
    cpu_seconds: float
    resident_bytes: int


def family(group: int) -> list[Member]:
    """The processes of a process group, and all that descend from them, whatever group those chose to be in."""
    alive = list(_processes())
    found = {member.id: member for member in alive if member.group == group}
    while more := {m.id: m for m in alive if m.parent in found and m.id not in found}:
        found |= more
    return list(found.values())


def cpu_seconds(members: Iterable[Member]) -> float:
    return sum(member.cpu_seconds for member in members)


def resident_bytes(members: Iterable[Member]) -> int:
    return sum(member.resident_bytes for member in members)


def busy_seconds() -> float:
    """Of all cores, whoever used them; what a hypervisor gave to others counts too."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split(None, 9)[1:9])
    return (user + nice + system + irq + softirq + steal) / TICKS


def _processes() -> Iterator[Member]:
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name stands in parentheses and may hold any character; the fields behind it are counted from 0.
            fields = file.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # ended meanwhile
        ticks = int(fields[11]) + int(fields[12])
        yield Member(
            int(file.parent.name), int(fields[1]), int(fields[2]), fields[0], ticks / TICKS, int(fields[21]) * PAGE
        )
