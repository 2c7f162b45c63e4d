"""Rank 0's side: starts the other ranks as processes of this machine, and tells them each step before it runs it."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

import bankfull
from bankfull.config import RunConfig, SchedConfig, StateConfig
from bankfull.errors import ConfigError
from bankfull.mesh import MeshSpec
from bankfull.parallel.groups import SECONDS, RankLost, RankPlace, Ranks, join
from bankfull.parallel.hot import HotExperts
from bankfull.parallel.messages import (
    HelloMessage,
    OutcomeMessage,
    RankConnection,
    RankReady,
    RankTask,
    ReplicatedMessage,
    ReplicateMessage,
    SettleMessage,
    encoded,
    masks_message,
    plan_message,
    step_result,
)
from bankfull.types import StepPlan, StepResult

HOST = "127.0.0.1"
ADDRESS, SECRET, RANK = "BANKFULL_RANK_ADDRESS", "BANKFULL_RANK_SECRET", "BANKFULL_RANK"
STEP_SECONDS = 600.0
"""The longest time of a step over all stages."""
START_SECONDS = 600.0
"""The longest time in which a rank reads its weights."""


class Followers:
    """The other ranks of a replica. They end with this object, and with this process."""

    def __init__(self, mesh: MeshSpec, device: str) -> None:
        """Start the processes, and wait until all have said hello."""
        check_devices(mesh, device)
        self.mesh = mesh
        self.hot: HotExperts | None = None
        """Of rank 0, until all ranks have copied them."""
        self._outcomes: deque[OutcomeMessage] = deque()
        """Results that came before they were asked for."""
        secret = secrets.token_hex(16)
        self._processes: list[subprocess.Popen[bytes]] = []
        self.connections: list[RankConnection] = []
        with socket.create_server((HOST, 0), backlog=mesh.ranks) as server:
            server.settimeout(SECONDS)
            address = f"{HOST}:{server.getsockname()[1]}"
            for rank in range(1, mesh.ranks):
                environment = {**os.environ, ADDRESS: address, SECRET: secret, RANK: str(rank)}
                own = [sys.executable, "-m", "bankfull.rank"]
                self._processes.append(subprocess.Popen(own, env=environment, stdin=subprocess.DEVNULL))
            self._end = weakref.finalize(self, _end, self._processes, self.connections)
            found: dict[int, RankConnection] = {}
            while len(found) < mesh.ranks - 1:
                try:
                    accepted, _ = server.accept()
                except TimeoutError:
                    self.close()
                    raise RankLost(f"not all ranks of {mesh} started within {SECONDS:g} s.") from None
                connection = RankConnection(accepted)
                hello = connection.from_follower(SECONDS)
                if not isinstance(hello, HelloMessage) or not secrets.compare_digest(hello.secret, secret):
                    connection.close()
                    continue
                if hello.version != bankfull.__version__:
                    self.close()
                    raise ConfigError(
                        f"Rank {hello.rank} runs bankfull {hello.version}, and rank 0 runs {bankfull.__version__}; "
                        "install the same version for all ranks."
                    )
                found[hello.rank] = connection
        self.connections += [found[rank] for rank in sorted(found)]

    def begin(self, model: str, run: RunConfig, sched: SchedConfig, state: StateConfig, max_len: int | None) -> Ranks:
        """Give every rank its task, and form the groups with them."""
        port = free_port()
        self._tell(encoded(RankTask(model, run, sched, state, max_len, port)))
        return join(RankPlace(self.mesh, 0), HOST, port, run.device)

    def await_ready(self) -> None:
        """Return when every rank has read its weights; raise what one of them says."""
        for rank, connection in enumerate(self.connections, 1):
            ready = connection.from_follower(START_SECONDS)
            if isinstance(ready, RankReady) and not ready.problem:
                continue
            self.close()
            if isinstance(ready, RankReady) and ready.refused:
                raise ConfigError(ready.problem)
            why = ready.problem if isinstance(ready, RankReady) else "it ended"
            raise RankLost(f"rank {rank} could not start: {why}.")

    # -- each step, called by the runner

    def forward(self, plan: StepPlan) -> None:
        if self.hot is not None and self.hot.due(plan):
            self._replicate(self.hot)
            self.hot = None
        self._tell(encoded(plan_message(plan)))

    def _replicate(self, hot: HotExperts) -> None:
        """All ranks copy their hot experts. None waits in a collective for one that still reads them."""
        self._tell(encoded(ReplicateMessage()))
        hot.replicate()
        for rank, connection in enumerate(self.connections, 1):
            while not isinstance(found := connection.from_follower(START_SECONDS), ReplicatedMessage):
                if not isinstance(found, OutcomeMessage):
                    raise RankLost(f"rank {rank} has ended while it copied experts.")
                self._outcomes.append(found)

    def finish(self, masks: Mapping[int, Any]) -> None:
        self._tell(encoded(masks_message(masks)))

    def settle(self, tokens: list[list[int]]) -> None:
        self._tell(encoded(SettleMessage(tokens)))

    def outcome(self) -> StepResult:
        if self._outcomes:
            return step_result(self._outcomes.popleft())
        last = self.connections[self.mesh.ranks - self.mesh.stage_ranks - 1]
        found = last.from_follower(STEP_SECONDS)
        if not isinstance(found, OutcomeMessage):
            raise RankLost("the last stage has ended.")
        return step_result(found)

    def _tell(self, frame: bytes) -> None:
        for connection in self.connections:
            connection.send_bytes(frame)

    def close(self) -> None:
        self._end()


def _end(processes: list[subprocess.Popen[bytes]], connections: list[RankConnection]) -> None:
    for connection in connections:
        connection.close()
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def check_devices(mesh: MeshSpec, device: str) -> None:
    if device == "cuda" and mesh.ranks > torch.cuda.device_count():
        raise ConfigError(
            f"The layout {mesh} needs {mesh.ranks} GPUs, one for each rank, and {torch.cuda.device_count()} are here; "
            "choose a smaller layout, or device=cpu."
        )


def free_port() -> int:
    with socket.create_server((HOST, 0)) as server:
        return int(server.getsockname()[1])
