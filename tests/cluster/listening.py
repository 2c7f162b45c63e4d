"""The listening ports of a server's processes, as the kernel and as docs/security.md tell them."""

from __future__ import annotations

import os
import re
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from tests.cluster.kit import processes

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
LISTENS = "0A"
DEAF_SECONDS = 0.3
KINDS = {
    "bankfull.serve.engine.worker": "engine",
    "bankfull.parallel.rank ": "rank",
    "ray::EngineReplica": "gateway",
    "ray::HostedRank": "host of a rank",
    "bankfull serve": "server",
}
"""By what a command line contains; what contains none of it is of Ray."""


@dataclass(frozen=True, slots=True)
class Listening:
    """A socket that listens."""

    process: str
    pid: int
    host: IPv4Address | IPv6Address
    port: int

    @property
    def loopback(self) -> bool:
        mapped = self.host.ipv4_mapped if isinstance(self.host, IPv6Address) else None
        return (mapped or self.host).is_loopback

    @property
    def deaf(self) -> bool:
        """Whether nobody gets in."""
        try:
            socket.create_connection((str(self.host), self.port), DEAF_SECONDS).close()
        except TimeoutError:
            return True
        return False


def listening(mark: str) -> list[Listening]:
    """Those of all processes that have inherited this entry of the environment."""
    commands = processes(mark)
    return sockets_of(
        {pid: next((kind for part, kind in KINDS.items() if part in said), "Ray") for pid, said in commands.items()}
    )


def sockets_of(processes: Mapping[int, str]) -> list[Listening]:
    """Those of processes of these kinds."""
    found = dict(_sockets())
    owned = {}
    for pid, kind in processes.items():
        for file in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                link = os.readlink(file)
            except OSError:
                continue
            if (inode := link.removeprefix("socket:[").rstrip("]")) in found:
                owned[kind, pid, inode] = Listening(kind, pid, *found[inode])
    return list(owned.values())


def _sockets() -> Iterator[tuple[str, tuple[IPv4Address | IPv6Address, int]]]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            host, _, port = fields[1].partition(":")
            if fields[3] == LISTENS:
                words = [bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8)]
                yield fields[9], (ip_address(b"".join(words)), int(port, 16))


def documented(*options: str) -> set[str]:
    """The processes that listen with these options, according to the page."""
    [table] = re.findall(r"<!-- listeners -->\n(.*?)<!-- /listeners -->", PAGE.read_text(), re.DOTALL)
    rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()[2:]]
    return {process for process, when, *_ in rows if when.strip("`") in ("every arrangement", *options)}


def per_process(found: list[Listening]) -> dict[str, set[int]]:
    """How many sockets listen in the processes of each kind."""
    counts = Counter((one.process, one.pid) for one in found)
    kinds: dict[str, set[int]] = {}
    for (kind, _), count in counts.items():
        kinds.setdefault(kind, set()).add(count)
    return kinds
