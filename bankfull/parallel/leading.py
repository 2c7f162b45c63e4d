"""Rank 0's side: starts the other ranks, as processes of this machine or on their hosts, and tells them each step
before it runs it."""

from __future__ import annotations

import secrets
import select
import socket
import subprocess
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

import bankfull
from bankfull.assembly import Assembled, assemble
from bankfull.combinations import Asked, refuse_impossible
from bankfull.config import RunConfig, SchedConfig, StateConfig
from bankfull.decode.strategy import Strategy
from bankfull.errors import ConfigError, RankLost
from bankfull.parallel.groups import Bounds, Ranks, join
from bankfull.parallel.hosting import rank_command
from bankfull.parallel.hot import HotExperts
from bankfull.parallel.meeting import KEY, Meeting
from bankfull.parallel.messages import (
    EraseMessage,
    HelloMessage,
    MovedMessage,
    OutcomeMessage,
    RankConnection,
    RankReady,
    RankTask,
    ReplicatedMessage,
    ReplicateMessage,
    SettleMessage,
    ToLeader,
    encoded,
    masks_message,
    plan_message,
    step_result,
)
from bankfull.parallel.placing import RayPlaces
from bankfull.parallel.reaching import RankHosts, meeting_key
from bankfull.ranks.mesh import MeshSpec
from bankfull.ranks.place import RankPlace
from bankfull.runtime.device import Device
from bankfull.runtime.device_runner import DeviceRunner
from bankfull.runtime.host import usable_cores
from bankfull.runtime.joint_moves import JointMoves, RankMoves
from bankfull.scratch import ScratchFolder
from bankfull.state.manager import StateManager
from bankfull.types import StepPlan, StepResult
from bankfull.weights.fingerprint import weights_fingerprint
from bankfull.weights.source import ModelFiles

BOUNDS = Bounds()
"""Longest waits of the ranks that are started from now on; tests have shorter ones."""


Made = TypeVar("Made")


def assemble_leader(
    name: str,
    files: ModelFiles,
    run: RunConfig,
    sched: SchedConfig,
    state: StateConfig,
    max_len: int | None,
    device: Device,
    strategy: Strategy | None = None,
    also: Asked = (),
) -> Assembled:
    """Rank 0 of a model over several ranks, which it starts. `strategy`, `also`: as for `assemble`."""
    run = replace(run, device=device.kind)
    refuse_impossible(files, device, run, sched, state, strategy, also)

    def own_part(run: RunConfig, ranks: Ranks) -> Assembled:
        return assemble(files, run, sched, state, max_len=max_len, device=device, ranks=ranks)

    assembled, followers = lead(name, files.path, run, sched, state, max_len, device, own_part)
    followers.attach(assembled.engine.runner, assembled.engine.scheduler.state)
    return assembled


def lead(
    name: str,
    path: Path,
    run: RunConfig,
    sched: SchedConfig,
    state: StateConfig,
    max_len: int | None,
    device: Device,
    own_part: Callable[[RunConfig, Ranks], Made],
) -> tuple[Made, Followers]:
    """Start the other ranks of `run.mesh`, and make this rank's part of the model while they make theirs. `path`: where
    the model `name` was found on this machine. If one of them fails, none is left."""
    places = None if run.ray is None else RayPlaces(run.ray, run.mesh)
    hosts, model, weights = RankHosts.of_environment() if places is None else places.hosts, str(path.absolute()), ""
    if hosts is not None:  # each machine finds its own copy: under the same path, or by the name
        model, weights = model if Path(name).expanduser().exists() else name, weights_fingerprint(path)
    elif run.device == "cpu" and run.threads is None:
        run = replace(run, threads=max(1, usable_cores() // run.mesh.ranks))
    followers = Followers(run.mesh, run.device, hosts, places)
    try:
        ranks = followers.begin(model, run, sched, state, max_len)
        if places is not None and run.threads is None:  # the hosts give the other ranks as many
            run = replace(run, threads=min(usable_cores(), places.threads))
        part = own_part(run, ranks)
        followers.hot = ranks.hot(device)
        followers.await_ready(weights)
        ranks.wait_at_most(followers.bounds.collective)
    except BaseException as error:
        try:
            if isinstance(error, RankLost):
                followers.raise_reason()
        finally:
            followers.close()
        raise
    return part, followers


class Followers:
    """The other ranks of a replica. They end with this object, and with this process."""

    def __init__(
        self, mesh: MeshSpec, device: str, hosts: RankHosts | None = None, places: RayPlaces | None = None
    ) -> None:
        """Start the processes, and wait until all have said hello. `hosts`: where they run; None: on this machine.
        `places`: those of the hosts, which are given back at the end."""
        self.mesh, self.apart, self.bounds = mesh, hosts is not None, BOUNDS
        self.hot: HotExperts | None = None
        """The hot experts of rank 0, until all ranks have copied them."""
        self._outcomes: deque[OutcomeMessage] = deque()
        """Results that came before they were asked for."""
        self._moves: list[RankMoves] = []
        """Reports of transfers that came before they were asked for."""
        self._processes: list[subprocess.Popen[bytes]] = []
        self.connections: list[RankConnection] = []
        self._folder = ScratchFolder("ranks")
        self._meeting_key = b"" if hosts is None else meeting_key(hosts.token)
        self._end = weakref.finalize(self, _end, self._processes, self.connections, places, self._folder)
        try:
            if hosts is None:
                check_devices(mesh, device)
                for rank in range(1, mesh.ranks):
                    self._start(rank)
            else:
                opened = hosts.connect(mesh.ranks - 1)
                self.connections += [RankConnection(one, f"rank {rank}") for rank, one in enumerate(opened, 1)]
            for connection in self.connections:
                self._greet(connection)
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        self.connections.append(RankConnection(ours, f"rank {rank}"))
        with theirs:
            command = rank_command(theirs.fileno())
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        self._processes.append(process)

    def _greet(self, connection: RankConnection) -> None:
        hello = connection.from_follower(self.bounds.begin)
        if not isinstance(hello, HelloMessage):
            raise RankLost(f"{connection.name} ended before it began.")
        if self.apart:
            connection.name += f" on {hello.node}"
        if hello.version != bankfull.__version__:
            raise ConfigError(
                f"{_capital(connection.name)} runs bankfull {hello.version}, and rank 0 runs {bankfull.__version__}; "
                "install the same version for all ranks."
            )

    def begin(self, model: str, run: RunConfig, sched: SchedConfig, state: StateConfig, max_len: int | None) -> Ranks:
        """Give every rank its task, and form the groups with them."""
        host, listening, key = self.connections[0].host, None, secrets.token_bytes(KEY)
        if self.apart:
            listening = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
            meeting = Meeting(self.bounds.begin, key, host=host, port=int(listening.getsockname()[1]))
        else:
            meeting = Meeting(self.bounds.begin, key, file=str(self._folder.path / "store"))
        for rank, connection in enumerate(self.connections, 1):
            # The host of a rank shows it one GPU only.
            rank_run = replace(run, device=f"cuda:{rank}") if run.device == "cuda" and not self.apart else run
            connection.send(RankTask(rank, model, rank_run, sched, state, max_len, meeting, self.bounds, self.apart))
        ranks = join(RankPlace(self.mesh, 0), meeting, host, run.device, self._meeting_key, listening)
        ranks.wait_at_most(self.bounds.load)
        return ranks

    def await_ready(self, weights: str = "") -> None:
        """Return when every rank has read its weights; raise what one of them says. `weights`: the fingerprint of rank
        0's, where ranks are apart."""
        for connection in self.connections:
            ready = connection.from_follower(self.bounds.load)
            if not isinstance(ready, RankReady):
                raise RankLost(f"{connection.name} could not start: it ended.")
            self._refuse(connection, ready)
            if ready.weights != weights:
                raise ConfigError(
                    f"{_capital(connection.name)} has other weights than rank 0 under the same name; copy the model's "
                    "files to all machines."
                )

    def raise_reason(self) -> None:
        """Raise what another rank has said about a failure of this rank, if one has."""
        for connection in self.connections:
            try:
                ready = connection.from_follower(self.bounds.word)
            except RankLost:
                continue
            if isinstance(ready, RankReady):
                self._refuse(connection, ready)

    def _refuse(self, connection: RankConnection, ready: RankReady) -> None:
        """Raise the problem that a rank reports, if it has one."""
        if not ready.problem:
            return
        if not ready.refused:
            raise RankLost(f"{connection.name} could not start: {ready.problem}")
        raise ConfigError(f"{_capital(connection.name)}: {ready.problem}" if self.apart else ready.problem)

    def attach(self, runner: DeviceRunner, state: StateManager) -> None:
        """From now on these ranks run the steps and the transfers of rank 0."""
        runner.followers = self
        mover, tiers = runner.mover, state.tiers
        if mover is None or tiers is None:
            return
        if keeping := sum(not RankPlace(self.mesh, rank).feeds for rank in range(1, self.mesh.ranks)):
            mover.others = JointMoves(self, keeping, mover.rates)
        if (erase_here := tiers.erase) is not None:

            def erase() -> None:
                self._tell(encoded(EraseMessage()))
                erase_here()

            tiers.erase = erase

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
        for connection in self.connections:
            while not isinstance(self._hear(connection, self.bounds.load), ReplicatedMessage):
                pass

    def finish(self, masks: Mapping[int, Any]) -> None:
        self._tell(encoded(masks_message(masks)))

    def settle(self, tokens: list[list[int]]) -> None:
        self._tell(encoded(SettleMessage(tokens)))

    def outcome(self) -> StepResult:
        last = self.connections[self.mesh.ranks - self.mesh.stage_ranks - 1]
        while not self._outcomes:
            self._hear(last, self.bounds.step)
        return step_result(self._outcomes.popleft())

    def reports(self, seconds: float) -> list[RankMoves]:
        poll = select.poll()
        for connection in self.connections:
            poll.register(connection, select.POLLIN)
        by_number = {connection.fileno(): connection for connection in self.connections}
        while ready := poll.poll(0 if self._moves else 1e3 * seconds):
            for number, _ in ready:
                self._hear(by_number[number], self.bounds.collective)
        moves, self._moves = self._moves, []
        return moves

    def _hear(self, connection: RankConnection, seconds: float) -> ToLeader:
        """The next message of a rank. What was not asked for is kept."""
        message = connection.from_follower(seconds)
        if isinstance(message, OutcomeMessage):
            self._outcomes.append(message)
        elif isinstance(message, MovedMessage):
            rank = 1 + self.connections.index(connection)
            self._moves.append(RankMoves(rank, message.completed, message.failed, message.rates))
        elif not isinstance(message, ReplicatedMessage):
            raise RankLost(f"{connection.name} has ended.")
        return message

    def wait_lost(self) -> str:
        """Until a rank has ended, or its machine is gone: one sentence. Waits beside steps, on a thread of its own."""
        poll = select.poll()
        for connection in self.connections:
            poll.register(connection, getattr(select, "POLLRDHUP", select.POLLHUP))
        lost = {number for number, _ in poll.poll()}
        return next(f"{one.name} has ended." for one in self.connections if one.fileno() in lost)

    def _tell(self, frame: bytes) -> None:
        for connection in self.connections:
            connection.send_bytes(frame)

    def close(self) -> None:
        self._end()


def _end(
    processes: list[subprocess.Popen[bytes]],
    connections: list[RankConnection],
    places: RayPlaces | None,
    folder: ScratchFolder,
) -> None:
    """Ranks have no state worth saving. Those of other machines end with their connections."""
    for connection in connections:
        connection.close()
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
    if places is not None:
        places.close()
    folder.close()


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def check_devices(mesh: MeshSpec, device: str) -> None:
    if device == "cuda" and mesh.ranks > torch.cuda.device_count():
        raise ConfigError(
            f"The layout {mesh} needs {mesh.ranks} GPUs, one for each rank, and {torch.cuda.device_count()} are here; "
            "choose a smaller layout, or device=cpu."
        )
