"""`Bench` over several ranks: rank 0 plans, the others are threads that run what it sends, in its own messages."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from bankfull.layers.build import Build
from bankfull.layers.shard import Shard
from bankfull.layers.stage import Stage
from bankfull.mesh import MeshSpec
from bankfull.models.registry import build_model
from bankfull.models.splitting import layer_count
from bankfull.ops import kit_for
from bankfull.parallel.following import follow
from bankfull.parallel.messages import (
    _TO_FOLLOWER,
    HEADER,
    SettleMessage,
    encoded,
    masks_message,
    plan_message,
    step_result,
)
from bankfull.runtime.device import open_device
from bankfull.runtime.device_runner import DeviceRunner
from bankfull.types import StepPlan, StepResult
from bankfull.weights.source import open_model
from tests.kit import Bench
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


def rank_model(shape: str, shard: ThreadRank | None, stage: Stage | None) -> Any:
    files = open_model(folder_of(shape))
    build = Build(files.source, kit_for("cpu", "torch"), torch.float32, torch.device("cpu"), stage=stage)
    return build_model(files.config, build if shard is None else replace(build, shard=Shard(shard)))


class SplitBench:
    """A `Bench` whose model is spread over `tp` tensor ranks in each of `pp` stages."""

    def __init__(self, shape: str, tp: int = 1, pp: int = 1, **settings: Any) -> None:
        layers = layer_count(open_model(folder_of(shape)).config)
        meetings = [Meeting(tp) for _ in range(pp)]
        borders = [[ThreadNeighbour() for _ in range(tp)] for _ in range(pp - 1)]
        models = []
        for number in range(tp * pp):
            at, index = divmod(number, tp)
            before, after = borders[at - 1][index] if at else None, borders[at][index] if at < pp - 1 else None
            stage = Stage(*MeshSpec(pp=pp).stages(layers)[at], before, after) if pp > 1 else None
            shard = ThreadRank(meetings[at], tp, index) if tp > 1 else None
            models.append(rank_model(shape, shard, stage))
        self.bench = Bench(models[0], open_device("cpu"), 0 if pp == 1 else pp, **settings)
        self.bench.engine.scheduler.stages = pp
        connections = [QueueConnection() for _ in models[1:]]
        self.errors: list[BaseException] = []
        self._threads = []
        first = self.bench.runner
        first.chooses = pp == 1
        for number, (model, connection) in enumerate(zip(models[1:], connections, strict=True), 1):
            runner = DeviceRunner(
                model,
                first.layout,
                open_device("cpu"),
                type(self.bench.strategy)(),
                rows=self.bench.sched.rows,
                max_len=self.bench.max_len,
                frames=self.bench.frames if first.layout.paged else 0,
                slots=self.bench.slots,
                step_tokens=self.bench.sched.step_tokens or 0,
                guesses=0 if self.bench.lookup is None else self.bench.lookup.most,
            )
            runner.chooses = number // tp == pp - 1
            tells = pp > 1 and number == tp * (pp - 1)
            thread = threading.Thread(target=self._follow, args=(connection, runner, meetings, tells))
            thread.start()
            self._threads.append(thread)
        self.followers = ThreadFollowers(connections, tp * (pp - 1) - 1)
        first.followers = self.followers

    def _follow(self, connection: QueueConnection, runner: DeviceRunner, meetings: list[Meeting], tells: bool) -> None:
        try:
            follow(connection, runner, tells)  # type: ignore[arg-type]
        except BaseException as error:
            self.errors.append(error)
            for meeting in meetings:
                meeting.leave()

    def __enter__(self) -> Bench:
        return self.bench

    def __exit__(self, *problem: object) -> None:
        self.followers.end()
        for thread in self._threads:
            thread.join(60)
        if self.errors:
            raise self.errors[0]
