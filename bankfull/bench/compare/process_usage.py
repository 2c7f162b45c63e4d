"""CPU time and memory of processes, from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Member:
    """A snapshot of a process."""

    id: int
    parent: int
    group: int
    state: str
    """State letter: R running, S sleeping, T stopped, Z zombie, ..."""
    cpu_seconds: float
    resident_bytes: int


def family(group: int) -> list[Member]:
    """The processes of a process group and all their descendants, also in other groups."""
    alive = list(_processes())
    members = {member.id: member for member in alive if member.group == group}
    while more := {m.id: m for m in alive if m.parent in members and m.id not in members}:
        members |= more
    return list(members.values())


def cpu_seconds(members: Iterable[Member]) -> float:
    return sum(member.cpu_seconds for member in members)


def resident_bytes(members: Iterable[Member]) -> int:
    return sum(member.resident_bytes for member in members)


def busy_seconds() -> float:
    """Busy seconds of all cores, including time stolen by the hypervisor."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split(None, 9)[1:9])
    return (user + nice + system + irq + softirq + steal) / TICKS


def _processes() -> Iterator[Member]:
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name is in parentheses and may contain any character; fields after it are indexed from 0.
            fields = file.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # exited meanwhile
        ticks = int(fields[11]) + int(fields[12])
        yield Member(
            int(file.parent.name), int(fields[1]), int(fields[2]), fields[0], ticks / TICKS, int(fields[21]) * PAGE
        )
