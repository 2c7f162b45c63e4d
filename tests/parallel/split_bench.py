"""`Bench` over several ranks: rank 0 plans, the others are threads that run what it sends, in its own messages."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bankfull.config import StateConfig
from bankfull.decode.plain import Plain
from bankfull.decode.strategy import Strategy
from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.models.registry import build_model, layer_count
from bankfull.ops import Sides, kit_for
from bankfull.parallel.following import FeedRunner, feed, follow
from bankfull.parallel.groups import Bounds
from bankfull.parallel.hot import HotExperts
from bankfull.parallel.leading import Followers
from bankfull.parallel.messages import _TO_FOLLOWER, HEADER
from bankfull.ranks.expert_ranks import ExpertRanks
from bankfull.ranks.group import RankGroup
from bankfull.ranks.mesh import MeshSpec
from bankfull.ranks.place import RankPlace
from bankfull.ranks.shard import Shard
from bankfull.ranks.stage import Stage
from bankfull.runtime.device import Cpu, Device
from bankfull.runtime.device_runner import DeviceRunner
from bankfull.runtime.joint_moves import RankMoves
from bankfull.runtime.tiering import add_tiers
from bankfull.spread.apart import Feeds, OneSide, with_remote_feeds
from bankfull.spread.decoder import RankDecoder
from bankfull.state.manager import StateManager
from bankfull.state.spec import joined_states, layout_of
from bankfull.weights.source import open_model
from tests.kit import Bench
from tests.parallel.built import expert_ranks
from tests.parallel.threads import Meeting, ThreadNeighbour, ThreadRank
from tests.tiny import folder_of


class QueueConnection:
    """Both ends."""

    def __init__(self) -> None:
        self.frames: queue.Queue[bytes | None] = queue.Queue()
        self._taken = False
        self.told: queue.Queue[Any] = queue.Queue()

    def send(self, message: Any) -> None:
        self.told.put(message)

    def send_bytes(self, frame: bytes | None) -> None:
        self.frames.put(frame)

    def from_follower(self, seconds: float) -> Any:
        return self.told.get(timeout=60)

    def from_leader(self, seconds: float | None = None) -> Any:
        if self._taken:
            self.frames.task_done()
        self._taken = True
        frame = self.frames.get()
        return None if frame is None else _TO_FOLLOWER.decode(frame[HEADER.size :])


class ThreadFollowers(Followers):
    """Rank 0's end, over queues."""

    def __init__(self, mesh: MeshSpec, connections: list[QueueConnection], hot: HotExperts | None) -> None:
        self.mesh, self.hot, self.bounds, self._outcomes, self._moves = mesh, hot, Bounds(), deque(), []
        self.connections = connections  # type: ignore[assignment]

    def reports(self, seconds: float) -> list[RankMoves]:
        for connection in self.connections:
            while not connection.told.empty():  # type: ignore[attr-defined]
                self._hear(connection, 0)
        found, self._moves = self._moves, []
        return found

    def end(self) -> None:
        for connection in self.connections:
            connection.send_bytes(None)  # type: ignore[arg-type]


class KeepingRank:
    """One of the ranks that keep state."""

    def __init__(self, group: ThreadRank, mesh: str) -> None:
        self._group, self.rank, self.facts = group, group.index, {"parallel": mesh, "rank": group.index}

    def gather(self, numbers: Sequence[int]) -> Tensor:
        return self._group.all_gather(torch.tensor(numbers, dtype=torch.int64))


@dataclass(frozen=True, slots=True)
class RankModel:
    """A rank's part of a model."""

    whole: Build
    """Of feed-forward layers, before they were split over their ranks."""
    model: Decoder
    experts: ExpertRanks | None
    sides: Sides | None


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

    def build(self, shape: str, number: int) -> RankModel:
        mesh, place, files = self.mesh, RankPlace(self.mesh, number), open_model(folder_of(shape))
        world = ThreadRank(self.meeting, mesh.ranks, number)
        stage = None
        if mesh.pp > 1:
            first, last = (at == place.stage or place.feeds for at in (0, mesh.pp - 1))
            before = None if first else self._border(number - mesh.stage_ranks, number)
            after = None if last else self._border(number, number + mesh.stage_ranks)
            stage = Stage(*mesh.stages(layer_count(files.config))[place.stage], before, after)
        near = place.tensor_ranks()
        experts = expert_ranks(world, mesh) if mesh.ep > 1 and (place.feeds or not mesh.ffn) else None
        whole = Build(
            files.source,
            kit_for("cpu", "torch"),
            torch.float32,
            torch.device("cpu"),
            stage=stage,
            context=world.among(*place.context_ranks()) if mesh.cp > 1 else None,
            sequence=mesh.sp,
        )
        build = replace(whole, shard=Shard(world.among(*near)) if len(near) > 1 else None, experts=experts)
        if not mesh.ffn:
            return RankModel(whole, build_model(files.config, build), experts, None)
        sides = Sides(world.among(*place.stage_ranks()), mesh.tp)
        model = build_model(files.config, build.placed(OneSide.of(sides)))
        return RankModel(whole, with_remote_feeds(whole, model, sides) if sides.runs_mixers else model, experts, sides)

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
        parts = [self.threads.build(shape, number) for number in range(mesh.ranks)]
        self.experts = [part.experts for part in parts]
        """Of each rank."""
        own_device = device()
        depth = own_device.depth if mesh.pp == 1 else mesh.pp
        own = strategy(self.threads.pages(0))
        self.bench = Bench(parts[0].model, own_device, depth, strategy=own, **settings)
        self.bench.engine.scheduler.stages = mesh.pp
        self.bench.poison = self._poison  # type: ignore[method-assign]
        self._connections = [QueueConnection() for _ in parts[1:]]
        self.errors: list[BaseException] = []
        self._threads: list[threading.Thread] = []
        self.runners = [self.bench.runner]
        first = self.bench.runner
        first.chooses = mesh.pp == 1
        last = mesh.ranks - mesh.stage_ranks
        hot = [
            HotExperts(() if one is None else one.layers, mesh.hot, first.device) if mesh.hot else None
            for one in self.experts
        ]
        for number, (part, connection) in enumerate(zip(parts[1:], self._connections, strict=True), 1):
            if RankPlace(mesh, number).feeds:
                assert part.sides is not None
                feeds = Feeds(part.whole, part.model, part.sides)
                self._start(feed, connection, FeedRunner(feeds, device()), hot[number])
                continue
            runner = self._runner(part.model, device(), strategy(self.threads.pages(number)))
            self.runners.append(runner)
            runner.chooses = number >= last
            self._start(follow, connection, runner, mesh.pp > 1 and number == last, hot[number])
        self.followers = ThreadFollowers(mesh, self._connections, hot[0])
        first.followers = self.followers
        self._poison()

    def add_tiers(self, config: StateConfig) -> None:
        """Tiers below the devices of all ranks, as a start makes them. The content depends on the layout only."""
        bench, keeping = self.bench, Meeting(len(self.runners))
        managers = [bench.manager]
        managers += [StateManager(one.layout, bench.frames, bench.slots, config) for one in self.runners[1:]]

        errors: list[BaseException] = []

        def add(index: int) -> None:
            rank = KeepingRank(ThreadRank(keeping, len(self.runners), index), str(self.threads.mesh))
            try:
                add_tiers(managers[index], self.runners[index], config, {"model": "tiny"}, rank)
            except BaseException as error:
                errors.append(error)
                keeping.leave()

        with ThreadPoolExecutor(len(self.runners)) as pool:
            list(pool.map(add, range(len(self.runners))))
        if errors:  # the others have waited for the first one
            raise errors[0]
        self.followers.attach(self.bench.runner, bench.manager)

    def _runner(self, model: Decoder, device: Device, strategy: Strategy) -> DeviceRunner:
        bench = self.bench
        strategy.prepare(model)
        layout = layout_of(joined_states(model.states(), strategy.states()), bench.state.page_tokens)
        if isinstance(model, RankDecoder) and model.all_states is not None:
            layout = layout.held(model.first, model.first + len(model.blocks))
        return DeviceRunner(
            model,
            layout,
            device,
            strategy,
            rows=bench.sched.rows,
            max_len=bench.max_len,
            frames=bench.frames if layout.paged else 0,
            slots=bench.slots,
            step_tokens=bench.sched.step_tokens or 0,
            guesses=0 if bench.lookup is None else bench.lookup.most,
        )

    def _start(self, work: Callable[..., None], *given: Any) -> None:
        thread = threading.Thread(target=self._follow, args=(work, *given))
        thread.start()
        self._threads.append(thread)

    def _follow(self, work: Callable[..., None], *given: Any) -> None:
        try:
            work(*given)
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
        for runner in self.runners:
            if runner.mover is not None:
                runner.mover.close()
        if self.errors:
            raise self.errors[0]
