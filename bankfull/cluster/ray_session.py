"""Ray on this machine, started for one server and closed to all others, or a Ray cluster that is joined."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from bankfull.cluster.ray_version import import_ray
from bankfull.cluster.sizes import NodeResources, Share
from bankfull.errors import ConfigError
from bankfull.scratch import ScratchFolder

OBJECT_STORE_BYTES = 80 << 20
"""Ray's shared memory. Requests do not pass through it; this is about the least that Ray accepts."""
LONGEST_FOLDER = 40
"""Characters of the path below which Ray's socket names, with a time and a number in them, stay within 107."""
NODE_LABEL = "ray.io/node-id"
JOIN_SECONDS = 10
"""Time-out of the connection to the head node."""

CLOSED = {
    "RAY_AUTH_MODE": "token",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on every system: listen on the loopback address only
    "RAY_enable_metrics_collection": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
}
"""Environment of a Ray that serves this machine only."""
JOINED = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": str(JOIN_SECONDS),
    "RAY_gcs_server_request_timeout_seconds": str(JOIN_SECONDS),
}
"""Defaults for the connection to a cluster; variables that the user has set have priority."""


class RaySession:
    """This process as a driver of Ray: all of its replicas end with it."""

    def __init__(self, address: str | None, folder: Path) -> None:
        """`folder`: a private one, removed with the session."""
        self.local = address is None
        self._folder = folder
        if address is None:
            os.environ.update(CLOSED, RAY_AUTH_TOKEN_PATH=str(_token_file(folder)))
            for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN"):
                os.environ.pop(name, None)
        else:
            for name, value in JOINED.items():
                os.environ.setdefault(name, value)
        self.ray: Any = import_ray()
        try:
            if address is None:
                self._start()
            else:
                self._join(address)
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        try:
            self.ray.init(
                address="local",
                num_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                namespace="bankfull",
                _temp_dir=str(self._folder / "ray"),  # Ray opens this one to all users
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except Exception as error:
            raise ConfigError(f"Ray cannot be started on this machine: {_first_line(error)}") from error

    def _join(self, address: str) -> None:
        if (why := _unreachable(address)) is not None:
            raise ConfigError(_join_failure(address, why))
        try:
            self.ray.init(address=address, namespace="bankfull", log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:
            raise ConfigError(_join_failure(address, str(error))) from error

    def nodes(self, without: Collection[str] = ()) -> list[NodeResources]:
        """The machines of the cluster that are alive, but those with these ids."""
        return [_resources(node) for node in self._alive() if node["NodeID"] not in without]

    def free(self, without: Collection[str] = ()) -> NodeResources:
        """CPUs and GPUs that no actor or task uses. Ray adds them up over all machines, so that those with the ids
        `without` count as free; fewer are reported if other work uses them."""
        free = self.ray.available_resources()
        barred = [_resources(node) for node in self._alive() if node["NodeID"] in without]
        cpus = free.get("CPU", 0.0) - sum(node.cpus for node in barred)
        gpus = free.get("GPU", 0.0) - sum(node.gpus for node in barred)
        return NodeResources(max(0.0, cpus), max(0.0, gpus))

    def reserve(self, share: Share, without: Collection[str] = (), *, first_here: bool = False) -> Any:
        """A placement group with a bundle for each rank of a replica, on few machines, but none of those with these
        ids. `first_here`: the first one is on this machine."""
        rank = share.of_rank
        bundle = {name: count for name, count in (("CPU", rank.cpus), ("GPU", rank.gpus)) if count}
        where = [allowed_nodes(without) if without else {}] * share.ranks
        if first_here:
            where[0] = {NODE_LABEL: self.own_node}
        selector = where if any(where) else None
        group: Any = self.ray.util.placement_group([bundle] * share.ranks, "PACK", bundle_label_selector=selector)
        return group

    def bundle(self, group: Any, number: int) -> Any:
        """The scheduling strategy of an actor in a bundle of a placement group."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)

    def release(self, group: Any) -> None:
        """End the actors of a placement group, and give its resources back."""
        self.ray.util.remove_placement_group(group)

    @property
    def own_node(self) -> str:
        """Ray's id of this machine."""
        return str(self.ray.get_runtime_context().get_node_id())

    def node_ids(self, host: str = "") -> set[str]:
        """Ray's ids of the machines that are alive; with `host`, of those with this address."""
        return {node["NodeID"] for node in self._alive() if not host or node["NodeManagerAddress"] == host}

    def _alive(self) -> list[dict[str, Any]]:
        return [node for node in self.ray.nodes() if node["Alive"]]

    def close(self) -> None:
        """End all replicas, and Ray if it was started here."""
        try:
            self.ray.shutdown()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)


def _token_file(folder: Path) -> Path:
    """A new token for Ray. Every process of Ray inherits the environment, which shows only where it lies."""
    path = folder / "token"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    return path


def allowed_nodes(without: Collection[str]) -> dict[str, str]:
    """Ray's selector of machines that have none of these ids."""
    return {NODE_LABEL: f"!in({','.join(without)})"}


def _resources(node: dict[str, Any]) -> NodeResources:
    return NodeResources(node["Resources"].get("CPU", 0.0), node["Resources"].get("GPU", 0.0))


def folder_for_ray() -> ScratchFolder:
    """A new folder with a path that is short enough for Ray's sockets in it."""
    base = tempfile.gettempdir()
    return ScratchFolder("ray", Path(base if len(base) < LONGEST_FOLDER else "/tmp"))


def _unreachable(address: str) -> str | None:
    """Why the head cannot be reached. Ray ends the whole process if it finds out itself."""
    if address == "auto":
        return None
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        return "it is not of the form HOST:PORT"
    try:
        socket.create_connection((host.strip("[]"), int(port)), JOIN_SECONDS).close()
    except (OSError, OverflowError) as error:
        return _first_line(error)
    return None


def _join_failure(address: str, text: str) -> str:
    if "Version mismatch" in text:
        versions = " ".join(line.strip() for line in text.splitlines() if line.strip().startswith(("Ray:", "Python:")))
        return (
            f"The Ray cluster at {address} has another version of Ray or Python than this server ({versions}): "
            "install the same versions on all nodes."
        )
    # Ray reports a wrong token as a connection that fails, although the head was reached before.
    if "uthenticat" in text or "token" in text.lower() or "Failed to connect to Ray cluster" in text:
        return (
            f"The Ray cluster at {address} does not accept this server's token: set RAY_AUTH_TOKEN or "
            "RAY_AUTH_TOKEN_PATH to the token of the cluster (docs/cluster.md)."
        )
    return (
        f"No Ray cluster answers at {address} ({_first_line(text)}): start its head with `ray start --head`, "
        "or leave out --ray to start Ray on this machine."
    )


def _first_line(error: object) -> str:
    return " ".join((str(error).strip().splitlines() or [type(error).__name__])[0].split())[:200].rstrip(".")
