"""The CPUs and GPUs of each replica, and the room of the machines."""

from __future__ import annotations

from dataclasses import dataclass

from bankfull.errors import ConfigError
from bankfull.fleet.replica_range import MOST_REPLICAS


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
        f"give fewer --replicas or engines of --separate, or a smaller {option}."
    )


def check_free(free: NodeResources, share: Share, replicas: int) -> None:
    """Raises ConfigError if other work leaves too little for that many replicas."""
    if free.room(share) < replicas:
        raise ConfigError(
            f"{replicas} replicas more with {share.cpus:g} CPUs and {share.gpus:g} GPUs each do not fit beside those "
            f"that run: {free.cpus:g} CPUs and {free.gpus:g} GPUs of the cluster are free."
        )
