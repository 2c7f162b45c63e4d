"""The real loader of a model over several ranks, with threads in place of its processes: each makes its part of the
model, of the state and of the strategy as a rank's process does, and meets the others in memory."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bankfull.loading
import bankfull.parallel.leading
from bankfull.config import RunConfig, SchedConfig, StateConfig
from bankfull.errors import BankfullError
from bankfull.ops import Sides
from bankfull.parallel import following
from bankfull.parallel.following import feed, follow, load_feeds, load_rank
from bankfull.parallel.groups import Ranks
from bankfull.ranks.mesh import MeshSpec
from bankfull.ranks.place import RankPlace
from bankfull.ranks.stage import Stage
from bankfull.runtime.device import Cpu, Device
from bankfull.runtime.device_runner import DeviceRunner
from tests.parallel import threads as meetings
from tests.parallel.built import expert_ranks
from tests.parallel.split_bench import QueueConnection, ThreadFollowers, ThreadMesh
from tests.parallel.threads import ThreadRank

PATIENCE = 20.0
"""Seconds that a rank waits for the others."""


class KeepingThreads(ThreadRank):
    """The ranks that keep state: they agree on sizes."""

    def gather(self, numbers: Sequence[int]) -> Tensor:
        return self.all_gather(torch.tensor(list(numbers), dtype=torch.int64))

    def least(self, numbers: Sequence[int]) -> list[int]:
        return [int(number) for number in self.gather(numbers).amin(0)]


@dataclass(frozen=True)
class ThreadRanks(Ranks):
    mesh: ThreadMesh | None = None

    @staticmethod
    def of(threads: ThreadMesh, number: int) -> ThreadRanks:
        """A rank's groups, as `join` forms them."""
        mesh, place = threads.mesh, RankPlace(threads.mesh, number)
        world: Any = ThreadRank(threads.meeting, mesh.ranks, number)
        holders = [rank for rank in range(mesh.ranks) if not RankPlace(mesh, rank).feeds]
        keeping: Any = None
        if not place.feeds and len(holders) > 1:
            keeping = KeepingThreads(threads.meeting.of(tuple(holders)), len(holders), holders.index(number))
        return ThreadRanks(
            place,
            world,
            world.among(*place.tensor_ranks()) if len(place.tensor_ranks()) > 1 else None,
            expert_ranks(world, mesh) if mesh.ep > 1 and (place.feeds or not mesh.ffn) else None,
            world.among(*place.context_ranks()) if mesh.cp > 1 else None,
            Sides(world.among(*place.stage_ranks()), mesh.tp) if mesh.ffn else None,
            keeping,
            threads,
        )

    def stage(self, layers: int) -> Stage | None:
        assert self.mesh is not None
        mesh, place = self.place.mesh, self.place
        if mesh.pp == 1:
            return None
        first, last = (at == place.stage or place.feeds for at in (0, mesh.pp - 1))
        before = None if first else self.mesh._border(place.rank - mesh.stage_ranks, place.rank)
        after = None if last else self.mesh._border(place.rank, place.rank + mesh.stage_ranks)
        return Stage(*mesh.stages(layers)[place.stage], before, after)

    def wait_at_most(self, seconds: float) -> None:
        """Threads wait as long as `tests.parallel.threads` says."""


class ThreadedRanks:
    """The other ranks of a case, from their start to their end."""

    def __init__(self, patch: pytest.MonkeyPatch, device: Callable[[], Device]) -> None:
        """`device`: makes that of a rank, whose delays are the same on all. Ranks of feed-forward layers get one
        without delays: they launch less, so their delays would be others, and each rank would wait for another one in
        the middle of a step; nobody reads a result of theirs."""
        self._device, self._own = device, threading.local()
        self._threads: list[threading.Thread] = []
        self._connections: list[QueueConnection] = []
        self._ready: queue.Queue[BaseException | None] = queue.Queue()
        self.errors: list[BaseException] = []
        self.runners: list[DeviceRunner] = []
        """Rank 0's first."""
        self.state: Any = None
        """The state manager of rank 0, once it is loaded."""
        patch.setattr(bankfull.parallel.leading, "lead", self._lead)
        for module in (bankfull.loading, following):
            patch.setattr(module, "open_device", lambda kind: Cpu() if self._own.feeds else self._device())
        patch.setattr(meetings, "SECONDS", PATIENCE)

    def _lead(
        self,
        name: str,
        path: Path,
        run: RunConfig,
        sched: SchedConfig,
        state: StateConfig,
        max_len: int | None,
        device: Device,
        own_part: Callable[[RunConfig, Ranks], Any],
    ) -> Any:
        mesh: MeshSpec = run.mesh
        self.mesh = ThreadMesh(mesh)
        self._connections = [QueueConnection() for _ in range(mesh.ranks - 1)]
        for number, connection in enumerate(self._connections, 1):
            work = (number, connection, name, run, sched, state, max_len)
            self._threads.append(threading.Thread(target=self._work, args=work, daemon=True))
            self._threads[-1].start()
        ranks, found = ThreadRanks.of(self.mesh, 0), list[BaseException]()
        try:
            made = own_part(run, ranks)
        except BaseException as error:
            found.append(error)
            self._part()
        found += [error for _ in self._threads if (error := self._ready.get(timeout=PATIENCE)) is not None]
        if found:
            self._end()
            raise next((error for error in found if isinstance(error, BankfullError)), found[0])
        self.runners.insert(0, made.engine.runner)
        return made, ThreadFollowers(mesh, self._connections, ranks.hot(device))

    def _work(self, number: int, connection: QueueConnection, name: str, run: RunConfig, *how: Any) -> None:
        sched, state, max_len = how
        begun = False
        try:
            ranks = ThreadRanks.of(self.mesh, number)
            self._own.feeds = ranks.place.feeds
            steps: Callable[[], None]
            if ranks.place.feeds:
                feeds = load_feeds(name, run, sched, max_len, ranks)
                steps = lambda: feed(connection, feeds, ranks.hot(feeds.device))  # type: ignore[arg-type] # noqa: E731
            else:
                runner = load_rank(name, run, sched, state, max_len, ranks)
                self.runners.append(runner)
                tells, hot = ranks.tells, ranks.hot(runner.device)
                steps = lambda: follow(connection, runner, tells, hot)  # type: ignore[arg-type] # noqa: E731
            begun = True
            self._ready.put(None)
            steps()
        except BaseException as error:
            self._part()
            if begun:
                self.errors.append(error)
            else:
                self._ready.put(error)

    def _part(self) -> None:
        """No rank waits for another any more."""
        self.mesh.meeting.leave()
        for border in self.mesh.borders.values():
            border._rows.put(None)  # type: ignore[arg-type]

    def poison(self) -> None:
        """Free places on every rank that keeps state, when it has done what it was told. Others meet a launched step
        before rank 0 runs it."""
        for number, connection in enumerate(self._connections, 1):
            if RankPlace(self.mesh.mesh, number).feeds:
                continue
            while connection.frames.unfinished_tasks and not self.errors:
                time.sleep(1e-4)
        state = self.state
        pages, slots = list(state.pages.free_places()), list(state.slots.free_places())
        for runner in self.runners:
            runner.storage.poison(pages, slots)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:  # nobody waits for rank 0 any more
            self._part()
        self._end()
        if self.errors and (error is None or isinstance(error, threading.BrokenBarrierError)):
            raise self.errors[0]  # the first one that failed

    def _end(self) -> None:
        for connection in self._connections:
            connection.send_bytes(None)
        for thread in self._threads:
            thread.join(PATIENCE)
        for runner in self.runners[1:]:  # the loader closes what it has made
            if runner.mover is not None:
                runner.mover.close()
