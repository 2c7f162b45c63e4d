"""A Ray cluster of several nodes on this machine, which a test may kill and add."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.cluster.kit import ENGINE, processes

NODES = """
import json, os, sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False,
    "object_store_memory": 80 << 20})
nodes = [cluster.add_node(num_cpus=1, object_store_memory=80 << 20) for _ in range(2)]
print(json.dumps({"address": cluster.address}), flush=True)
for line in sys.stdin:
    command, _, folder = line.strip().partition(" ")
    if command == "kill":
        cluster.remove_node(nodes.pop(0), allow_graceful=False)
    if command == "add":
        os.environ["PYTHONPATH"] = folder
        nodes.append(cluster.add_node(num_cpus=1, object_store_memory=80 << 20))
    print("{}", flush=True)
cluster.shutdown()
"""


class RayNodes:
    """A Ray cluster of three nodes with one CPU each, all on this machine, with a token."""

    def __init__(self, folder: Path) -> None:
        self.token = secrets.token_hex(32)
        environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}
        environment.update(RAY_USAGE_STATS_ENABLED="0", RAY_TMPDIR=str(folder), BANKFULL_TEST_NODES=str(folder))
        self.mark = f"BANKFULL_TEST_NODES={folder}"
        self.process = subprocess.Popen(
            [sys.executable, "-c", NODES],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self.address = str(self._answer()["address"])

    def kill_node(self) -> None:
        """The oldest one but the head."""
        self._order("kill")

    def add_node(self, modules: Path | None = None) -> None:
        """`modules`: a folder from which its processes import first."""
        self._order("add" if modules is None else f"add {modules}")

    def _order(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        self._answer()

    def engines(self) -> list[int]:
        return [pid for pid, command in processes(self.mark).items() if ENGINE in command]

    def replicas(self) -> list[int]:
        """The processes of gateways and engines."""
        gateways = [pid for pid, name in processes(self.mark).items() if name.startswith("ray::EngineReplica")]
        return gateways + self.engines()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        told: dict[str, Any] = json.loads(next(line for line in self.process.stdout if line.startswith("{")))
        return told

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        finally:
            with suppress(ProcessLookupError):  # all have ended
                os.killpg(self.process.pid, signal.SIGKILL)


@contextmanager
def running_nodes() -> Iterator[RayNodes]:
    folder = Path(tempfile.mkdtemp(prefix="bf-nodes-"))  # short: Ray puts sockets below it
    nodes = RayNodes(folder)
    try:
        yield nodes
    finally:
        nodes.close()
        shutil.rmtree(folder, ignore_errors=True)
