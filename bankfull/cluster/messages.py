"""The messages between the server and its cluster manager: JSON lines over a private socket pair."""

from __future__ import annotations

import msgspec

MOST_BYTES = 1 << 20
"""Bytes of a line."""

# -- to the manager


class StartCluster(msgspec.Struct, tag="start"):
    """The first message."""

    replicas: int
    most: int
    """The largest number of replicas, from which the CPUs of each are derived."""
    token: str
    """The secret of the gateways, in hexadecimal digits."""
    folder: str
    """A private folder for Ray's files, if it is started here."""
    address: str | None = None
    """The Ray cluster to join; None: start one on this machine."""
    cpus: float | None = None
    gpus: float | None = None
    """CPUs and GPUs of each replica; None: derived from the cluster."""
    ranks: int = 1
    """Ranks of each replica."""
    device: str = "auto"
    tls: str = ""
    """The folder of `handshake.link_tls.LinkTls` on each machine; empty: without TLS."""
    first: int = 1
    """Number of the first replica, in its name."""
    again: bool = False
    """Whether the server has had replicas before. A node with another version is then refused alone; at the first start
    it is an error."""


class AddReplicas(msgspec.Struct, tag="add"):
    count: int
    first: int = 1
    """Number of the first of them, in its name, unless it is taken."""
    now: bool = False
    """Whether they are wanted only if Ray has free resources for them, and need not wait for other work to end."""


class RemoveReplica(msgspec.Struct, tag="remove"):
    """End a replica that the server has drained."""

    name: str


ToManager = StartCluster | AddReplicas | RemoveReplica

# -- from the manager


class ClusterUp(msgspec.Struct, tag="up"):
    """All replicas that were asked for at the start are placed."""

    threads: int
    """Threads that the engine of a replica may use."""
    cpus: float
    gpus: float
    nodes: int
    local: bool
    """Whether the manager has started Ray itself."""


class ReplicaPlaced(msgspec.Struct, tag="placed"):
    """A replica's gateway listens, for the first time or again after a restart by Ray."""

    name: str
    host: str
    port: int
    node: str
    restarts: int = 0


class ReplicaLost(msgspec.Struct, tag="lost"):
    """A replica does not answer; Ray starts it again as soon as it can be placed."""

    name: str
    why: str


class RefusedNodes(msgspec.Struct, tag="refused"):
    """The nodes that get no replica because their version of bankfull differs; sent when they change."""

    nodes: dict[str, str]
    """Ray's id of the node, and the reason in one sentence."""


class CannotAdd(msgspec.Struct, tag="cannot"):
    """The cluster has no room for more replicas."""

    why: str


class ClusterFailed(msgspec.Struct, tag="failed"):
    """The cluster cannot be used. Everything that was started is stopped again."""

    why: str


FromManager = ClusterUp | ReplicaPlaced | ReplicaLost | RefusedNodes | CannotAdd | ClusterFailed


def line(message: ToManager | FromManager) -> bytes:
    return msgspec.json.encode(message) + b"\n"


to_manager = msgspec.json.Decoder(ToManager)
from_manager = msgspec.json.Decoder(FromManager)
