"""The number of replicas, and the CPUs and GPUs of each."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bankfull.errors import ConfigError

MOST_REPLICAS = 1000


@dataclass(frozen=True, slots=True)
class ReplicaRange:
    """A fixed number of replicas, or the bounds of autoscaling."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> ReplicaRange:
        found = re.fullmatch(r"(\d{1,6})(?:\.\.(\d{1,6}))?", text.strip())
        least = int(found[1]) if found else 0
        most = int(found[2]) if found and found[2] else least
        if not 1 <= least <= most <= MOST_REPLICAS:
            raise ConfigError(
                f"{text[:40]!r} is no number of replicas: give one from 1 to {MOST_REPLICAS}, or a range such as 1..4."
            )
        return cls(least, most)

    @property
    def scales(self) -> bool:
        return self.least < self.most

    def __str__(self) -> str:
        return f"{self.least}..{self.most}" if self.scales else str(self.least)


@dataclass(frozen=True, slots=True)
class Share:
    """Resources of each replica."""

    cpus: float
    gpus: float

    @property
    def threads(self) -> int:
        return max(1, int(self.cpus))


def share_of(
    cpus: float, gpus: float, most: int, wanted_cpus: float | None, wanted_gpus: float | None, device: str
) -> Share:
    """The share of each of `most` replicas in a cluster with `cpus` and `gpus`, where the user did not choose it."""
    if wanted_gpus is None:
        wanted_gpus = 0.0 if device == "cpu" or (device == "auto" and not gpus) else 1.0
    if wanted_cpus is None:
        wanted_cpus = float(max(1, int(cpus // most)))
    return Share(wanted_cpus, wanted_gpus)


@dataclass(frozen=True, slots=True)
class NodeResources:
    """CPUs and GPUs of one machine."""

    cpus: float
    gpus: float

    def room(self, share: Share) -> int:
        """Replicas that fit on this machine."""
        rooms = [MOST_REPLICAS]
        if share.cpus:
            rooms.append(int(self.cpus / share.cpus + 1e-9))
        if share.gpus:
            rooms.append(int(self.gpus / share.gpus + 1e-9))
        return min(rooms)


def check_room(nodes: list[NodeResources], share: Share, replicas: int) -> None:
    """Raises ConfigError if the machines are too small for that many replicas."""
    room = sum(node.room(share) for node in nodes)
    if room >= replicas:
        return
    cpus, gpus = sum(node.cpus for node in nodes), sum(node.gpus for node in nodes)
    short = share.gpus and sum(int(node.gpus / share.gpus + 1e-9) for node in nodes) < replicas
    option = "--replica-gpus" if short else "--replica-cpus"
    raise ConfigError(
        f"{replicas} replicas with {share.cpus:g} CPUs and {share.gpus:g} GPUs each do not fit: the cluster has "
        f"{cpus:g} CPUs and {gpus:g} GPUs on {len(nodes)} machines, room for {room}; "
        f"give fewer --replicas, or a smaller {option}."
    )
