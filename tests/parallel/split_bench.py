"""`Bench` over several ranks: rank 0 plans, the others are threads that run what it sends, in its own messages."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from bankfull.layers.apart import Feeds, SideBuild, with_remote_feeds
from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.layers.expert_ranks import ExpertRanks
from bankfull.layers.shard import Shard
from bankfull.layers.stage import Stage
from bankfull.layers.staged import StageDecoder
from bankfull.mesh import ALONE, MeshSpec
from bankfull.models.registry import build_model
from bankfull.models.splitting import layer_count
from bankfull.ops import Sides, kit_for
from bankfull.parallel.following import FeedRunner, feed, follow
from bankfull.parallel.groups import RankPlace
from bankfull.parallel.hot import HotExperts
from bankfull.parallel.leading import Followers
from bankfull.parallel.messages import _TO_FOLLOWER, HEADER
from bankfull.runtime.device import open_device
from bankfull.runtime.device_runner import DeviceRunner
from bankfull.state.spec import layout_of
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
        self.mesh, self.hot, self._outcomes = mesh, hot, deque()
        self.connections = connections  # type: ignore[assignment]

    def end(self) -> None:
        for connection in self.connections:
            connection.send_bytes(None)  # type: ignore[arg-type]


def rank_model(
    shape: str, shard: ThreadRank | None, stage: Stage | None, sides: Sides | None, experts: ExpertRanks | None
) -> tuple[Build, Decoder]:
    files = open_model(folder_of(shape))
    whole = Build(files.source, kit_for("cpu", "torch"), torch.float32, torch.device("cpu"), stage=stage)
    build = replace(whole, shard=None if shard is None else Shard(shard), experts=experts)
    if sides is None:
        return whole, build_model(files.config, build)
    model = build_model(files.config, SideBuild.of(build, sides))
    return whole, with_remote_feeds(whole, model, sides) if sides.runs_mixers else model


class SplitBench:
    """A `Bench` whose model is spread over a mesh."""

    def __init__(self, shape: str, mesh: MeshSpec | str = ALONE, **settings: Any) -> None:
        mesh = MeshSpec.parse(mesh) if isinstance(mesh, str) else mesh
        tp, pp, layers = mesh.tp, mesh.pp, layer_count(open_model(folder_of(shape)).config)
        self.meetings = [Meeting(mesh.stage_ranks) for _ in range(pp)]
        self.experts: list[ExpertRanks | None] = []
        """Of each rank."""
        borders = [[ThreadNeighbour() for _ in range(tp)] for _ in range(pp - 1)]
        models = []
        for number in range(mesh.ranks):
            place = RankPlace(mesh, number)
            at, index = divmod(number, mesh.stage_ranks)
            before = borders[at - 1][index] if at and not place.feeds else None
            after = borders[at][index] if at < pp - 1 and not place.feeds else None
            stage = Stage(*mesh.stages(layers)[at], before, after) if pp > 1 else None
            rank = ThreadRank(self.meetings[at], mesh.stage_ranks, index)
            near = [one % mesh.stage_ranks for one in place.tensor_ranks()]
            sides = Sides(rank, tp) if mesh.ffn else None
            experts = expert_ranks(rank, mesh) if mesh.ep > 1 and (place.feeds or not mesh.ffn) else None
            self.experts.append(experts)
            shard = rank.among(*near) if len(near) > 1 else None
            models.append((*rank_model(shape, shard, stage, sides, experts), sides))
        self.bench = Bench(models[0][1], open_device("cpu"), 0 if pp == 1 else pp, **settings)
        self.bench.engine.scheduler.stages = pp
        connections = [QueueConnection() for _ in models[1:]]
        self.errors: list[BaseException] = []
        self._threads = []
        first = self.bench.runner
        first.chooses = pp == 1
        hot = [
            HotExperts(() if one is None else one.layers, mesh.hot, first.device) if mesh.hot else None
            for one in self.experts
        ]
        for number, ((build, model, sides), connection) in enumerate(zip(models[1:], connections, strict=True), 1):
            if RankPlace(mesh, number).feeds:
                assert sides is not None
                self._start(feed, connection, FeedRunner(Feeds(build, model, sides), open_device("cpu")), hot[number])
                continue
            layout = layout_of(model.states(), self.bench.state.page_tokens)
            if isinstance(model, StageDecoder):
                layout = layout.held(model.first, model.first + len(model.blocks))
            runner = DeviceRunner(
                model,
                layout,
                open_device("cpu"),
                type(self.bench.strategy)(),
                rows=self.bench.sched.rows,
                max_len=self.bench.max_len,
                frames=self.bench.frames if first.layout.paged else 0,
                slots=self.bench.slots,
                step_tokens=self.bench.sched.step_tokens or 0,
                guesses=0 if self.bench.lookup is None else self.bench.lookup.most,
            )
            runner.chooses = number // mesh.stage_ranks == pp - 1
            self._start(follow, connection, runner, pp > 1 and number == mesh.ranks - mesh.stage_ranks, hot[number])
        self.followers = ThreadFollowers(mesh, connections, hot[0])
        first.followers = self.followers

    def _start(self, work: Callable[..., None], *given: Any) -> None:
        thread = threading.Thread(target=self._follow, args=(work, *given))
        thread.start()
        self._threads.append(thread)

    def _follow(self, work: Callable[..., None], *given: Any) -> None:
        try:
            work(*given)
        except BaseException as error:
            self.errors.append(error)
            for meeting in self.meetings:
                meeting.leave()

    def __enter__(self) -> Bench:
        return self.bench

    def __exit__(self, *problem: object) -> None:
        self.followers.end()
        for thread in self._threads:
            thread.join(60)
        if self.errors:
            raise self.errors[0]
