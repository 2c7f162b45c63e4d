"""The CPUs and GPUs of each replica, and the room of the machines."""

from __future__ import annotations

from dataclasses import dataclass

from bankfull.errors import ConfigError
from bankfull.fleet.replica_range import MOST_REPLICAS


@dataclass(frozen=True, slots=True)
class Share:
    """Resources of each replica, which its ranks have in equal parts."""

    cpus: float
    gpus: float
    ranks: int = 1

    @property
    def threads(self) -> int:
        """Threads of one rank."""
        return max(1, int(self.of_rank.cpus))

    @property
    def of_rank(self) -> Share:
        return Share(self.cpus / self.ranks, self.gpus / self.ranks)

    def __str__(self) -> str:
        ranks = "" if self.ranks == 1 else f" for {self.ranks} ranks"
        return f"{self.cpus:g} CPUs and {self.gpus:g} GPUs{ranks} each"


def share_of(
    cpus: float,
    gpus: float,
    most: int,
    wanted_cpus: float | None,
    wanted_gpus: float | None,
    device: str,
    ranks: int = 1,
) -> Share:
    """The share of each of `most` replicas in a cluster with `cpus` and `gpus`, where the user did not choose it."""
    if wanted_gpus is None:
        wanted_gpus = 0.0 if device == "cpu" or (device == "auto" and not gpus) else float(ranks)
    if wanted_gpus > ranks > 1:
        raise ConfigError(
            f"--replica-gpus {wanted_gpus:g} is more than one GPU for each of the {ranks} ranks of a replica; give "
            f"{ranks}."
        )
    if wanted_cpus is None:
        wanted_cpus = float(max(1, int(cpus // most)))
        if wanted_cpus > ranks:  # whole ones for each rank
            wanted_cpus -= wanted_cpus % ranks
    return Share(wanted_cpus, wanted_gpus, ranks)


@dataclass(frozen=True, slots=True)
class NodeResources:
    """CPUs and GPUs of one machine."""

    cpus: float
    gpus: float

    def room(self, share: Share) -> int:
        """Replicas, or ranks, that fit on this machine with such a share each."""
        rooms = [MOST_REPLICAS]
        if share.cpus:
            rooms.append(int(self.cpus / share.cpus + 1e-9))
        if share.gpus:
            rooms.append(int(self.gpus / share.gpus + 1e-9))
        return min(rooms)


def check_room(nodes: list[NodeResources], share: Share, replicas: int) -> None:
    """Raises ConfigError if the machines are too small for that many replicas."""
    rank = share.of_rank
    room = sum(node.room(rank) for node in nodes) // share.ranks
    if room >= replicas:
        return
    cpus, gpus = sum(node.cpus for node in nodes), sum(node.gpus for node in nodes)
    short = rank.gpus and sum(int(node.gpus / rank.gpus + 1e-9) for node in nodes) < replicas * share.ranks
    option = "--replica-gpus" if short else "--replica-cpus"
    raise ConfigError(
        f"{replicas} replicas with {share} do not fit: the cluster has "
        f"{cpus:g} CPUs and {gpus:g} GPUs on {len(nodes)} machines, room for {room}; "
        f"give fewer --replicas or engines of --separate, or a smaller {option}."
    )


def check_free(free: NodeResources, share: Share, replicas: int) -> None:
    """Raises ConfigError if other work leaves too little for that many replicas."""
    if free.room(share.of_rank) // share.ranks < replicas:
        raise ConfigError(
            f"{replicas} replicas more with {share} do not fit beside those that run: {free.cpus:g} CPUs and "
            f"{free.gpus:g} GPUs of the cluster are free."
        )
