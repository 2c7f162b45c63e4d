"""`Bench` over several ranks: rank 0 plans, the others are threads that run what it sends, in its own messages."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from bankfull.decode.plain import Plain
from bankfull.decode.strategy import Strategy
from bankfull.layers.build import Build
from bankfull.layers.shard import Shard
from bankfull.layers.stage import Stage
from bankfull.mesh import MeshSpec
from bankfull.models.registry import build_model
from bankfull.models.splitting import layer_count
from bankfull.ops import kit_for
from bankfull.ops.ranks import RankGroup
from bankfull.parallel.following import follow
from bankfull.parallel.groups import RankPlace
from bankfull.parallel.messages import (
    _TO_FOLLOWER,
    HEADER,
    SettleMessage,
    encoded,
    masks_message,
    plan_message,
    step_result,
)
from bankfull.runtime.device import Cpu, Device
from bankfull.runtime.device_runner import DeviceRunner
from bankfull.types import StepPlan, StepResult
from bankfull.weights.source import open_model
from tests.kit import Bench
from tests.parallel.built import expert_ranks
from tests.parallel.threads import Meeting, ThreadNeighbour, ThreadRank
from tests.tiny import folder_of


class QueueConnection:
    """The follower's end."""

    def __init__(self) -> None:
        self.frames: queue.Queue[bytes | None] = queue.Queue()
        self._taken = False
        self.told: queue.Queue[Any] = queue.Queue()

    def send(self, message: Any) -> None:
        self.told.put(message)

    def from_leader(self, seconds: float | None = None) -> Any:
        if self._taken:
            self.frames.task_done()
        self._taken = True
        frame = self.frames.get()
        return None if frame is None else _TO_FOLLOWER.decode(frame[HEADER.size :])


class ThreadFollowers:
    """Rank 0's end."""

    def __init__(self, connections: list[QueueConnection], last: int) -> None:
        self.connections, self._last = connections, last

    def forward(self, plan: StepPlan) -> None:
        self._tell(encoded(plan_message(plan)))

    def finish(self, masks: Mapping[int, Any]) -> None:
        self._tell(encoded(masks_message(masks)))

    def settle(self, tokens: list[list[int]]) -> None:
        self._tell(encoded(SettleMessage(tokens)))

    def outcome(self) -> StepResult:
        return step_result(self.connections[self._last].told.get(timeout=60))

    def _tell(self, frame: bytes | None) -> None:
        for connection in self.connections:
            connection.frames.put(frame)

    def end(self) -> None:
        self._tell(None)


class ThreadMesh:
    """The ranks of a mesh as threads: each one's groups and neighbours."""

    def __init__(self, mesh: MeshSpec) -> None:
        self.mesh, self.meeting = mesh, Meeting(mesh.ranks)
        self.borders: dict[tuple[int, int], ThreadNeighbour] = {}

    def pages(self, number: int) -> ThreadRank | None:
        """The ranks that a rank's pages go round."""
        if self.mesh.page_ranks == 1:
            return None
        return ThreadRank(self.meeting, self.mesh.ranks, number).among(*RankPlace(self.mesh, number).context_ranks())

    def build(self, shape: str, number: int) -> Any:
        mesh, place, files = self.mesh, RankPlace(self.mesh, number), open_model(folder_of(shape))
        world = ThreadRank(self.meeting, mesh.ranks, number)
        stage = None
        if mesh.pp > 1:
            before = self._border(number - mesh.stage_ranks, number) if place.stage else None
            after = self._border(number, number + mesh.stage_ranks) if place.stage < mesh.pp - 1 else None
            stage = Stage(*mesh.stages(layer_count(files.config))[place.stage], before, after)
        build = Build(
            files.source,
            kit_for("cpu", "torch"),
            torch.float32,
            torch.device("cpu"),
            stage=stage,
            shard=Shard(world.among(*place.tensor_ranks())) if mesh.tp > 1 else None,
            experts=expert_ranks(world, mesh) if mesh.ep > 1 else None,
            context=world.among(*place.context_ranks()) if mesh.cp > 1 else None,
            sequence=mesh.sp,
        )
        return build_model(files.config, build)

    def _border(self, before: int, after: int) -> ThreadNeighbour:
        return self.borders.setdefault((before, after), ThreadNeighbour())


class SplitBench:
    """A `Bench` whose model is spread over the ranks of a mesh."""

    def __init__(
        self,
        shape: str,
        layout: str = "tp=1",
        strategy: Callable[[RankGroup | None], Strategy] = lambda pages: Plain(),
        device: Callable[[], Device] = Cpu,
        **settings: Any,
    ) -> None:
        """`strategy`: makes that of a rank, from the ranks that its pages go round. `device`: makes that of a rank."""
        mesh = MeshSpec.parse(layout)
        self.threads = ThreadMesh(mesh)
        models = [self.threads.build(shape, number) for number in range(mesh.ranks)]
        own_device = device()
        depth = own_device.depth if mesh.pp == 1 else mesh.pp
        self.bench = Bench(models[0], own_device, depth, strategy=strategy(self.threads.pages(0)), **settings)
        self.bench.engine.scheduler.stages = mesh.pp
        self.bench.poison = self._poison  # type: ignore[method-assign]
        self._connections = [QueueConnection() for _ in models[1:]]
        self.errors: list[BaseException] = []
        self._threads, self.runners = [], [self.bench.runner]
        first = self.bench.runner
        first.chooses = mesh.pp == 1
        last = mesh.ranks - mesh.stage_ranks
        for number, (model, connection) in enumerate(zip(models[1:], self._connections, strict=True), 1):
            own = strategy(self.threads.pages(number))
            own.prepare(model)
            runner = DeviceRunner(
                model,
                first.layout,
                device(),
                own,
                rows=self.bench.sched.rows,
                max_len=self.bench.max_len,
                frames=self.bench.frames if first.layout.paged else 0,
                slots=self.bench.slots,
                step_tokens=self.bench.sched.step_tokens or 0,
                guesses=0 if self.bench.lookup is None else self.bench.lookup.most,
            )
            self.runners.append(runner)
            runner.chooses = number >= last
            thread = threading.Thread(target=self._follow, args=(connection, runner, mesh.pp > 1 and number == last))
            thread.start()
            self._threads.append(thread)
        self.followers = ThreadFollowers(self._connections, last - 1)
        first.followers = self.followers
        self._poison()

    def _follow(self, connection: QueueConnection, runner: DeviceRunner, tells: bool) -> None:
        try:
            follow(connection, runner, tells)  # type: ignore[arg-type]
        except BaseException as error:
            self.errors.append(error)
            self.threads.meeting.leave()

    def _poison(self) -> None:
        """On every rank, when it has done what it was told."""
        for connection in self._connections:
            while connection.frames.unfinished_tasks and not self.errors:
                time.sleep(1e-4)
        state = self.bench.manager
        pages, slots = list(state.pages.free_places()), list(state.slots.free_places())
        for runner in self.runners:
            runner.storage.poison(pages, slots)

    def __enter__(self) -> Bench:
        return self.bench

    def __exit__(self, *problem: object) -> None:
        self.followers.end()
        for thread in self._threads:
            thread.join(60)
        if self.errors:
            raise self.errors[0]
