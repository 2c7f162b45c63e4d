"""`Bench` over several ranks: rank 0 plans, the others are threads that run what it sends, in its own messages."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from typing import Any

import torch

from bankfull.layers.build import Build
from bankfull.layers.shard import Shard
from bankfull.models.registry import build_model
from bankfull.ops import kit_for
from bankfull.parallel.following import follow
from bankfull.parallel.messages import _TO_FOLLOWER, HEADER, Settle, encoded, masks_message, plan_message
from bankfull.runtime.device import open_device
from bankfull.runtime.device_runner import DeviceRunner
from bankfull.types import StepPlan
from bankfull.weights.source import open_model
from tests.kit import Bench
from tests.parallel.threads import Meeting, ThreadRank
from tests.tiny import folder_of


class QueueConnection:
    """The follower's end."""

    def __init__(self) -> None:
        self.frames: queue.Queue[bytes | None] = queue.Queue()
        self._taken = False

    def from_leader(self, seconds: float | None = None) -> Any:
        if self._taken:
            self.frames.task_done()
        self._taken = True
        frame = self.frames.get()
        return None if frame is None else _TO_FOLLOWER.decode(frame[HEADER.size :])


class ThreadFollowers:
    """Rank 0's end."""

    def __init__(self, connections: list[QueueConnection]) -> None:
        self.connections = connections

    def forward(self, plan: StepPlan) -> None:
        self._tell(encoded(plan_message(plan)))

    def finish(self, masks: Mapping[int, Any]) -> None:
        self._tell(encoded(masks_message(masks)))

    def settle(self) -> None:
        self._tell(encoded(Settle()))

    def _tell(self, frame: bytes | None) -> None:
        for connection in self.connections:
            connection.frames.put(frame)

    def end(self) -> None:
        self._tell(None)


def rank_model(shape: str, rank: ThreadRank, dtype: torch.dtype = torch.float32) -> Any:
    files = open_model(folder_of(shape))
    build = Build(files.source, kit_for("cpu", "torch"), dtype, torch.device("cpu"), shard=Shard(rank))
    return build_model(files.config, build)


class SplitBench:
    """A `Bench` whose model is spread over `count` tensor ranks."""

    def __init__(self, shape: str, count: int, **settings: Any) -> None:
        meeting = Meeting(count)
        self.ranks = [ThreadRank(meeting, count, index) for index in range(count)]
        models = [rank_model(shape, rank) for rank in self.ranks]
        self.bench = Bench(models[0], open_device("cpu"), 0, **settings)
        connections = [QueueConnection() for _ in models[1:]]
        self.errors: list[BaseException] = []
        self._threads = []
        first = self.bench.runner
        for model, connection in zip(models[1:], connections, strict=True):
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
            thread = threading.Thread(target=self._follow, args=(connection, runner, meeting))
            thread.start()
            self._threads.append(thread)
        self.followers = ThreadFollowers(connections)
        first.followers = self.followers

    def _follow(self, connection: QueueConnection, runner: DeviceRunner, meeting: Meeting) -> None:
        try:
            follow(connection, runner)  # type: ignore[arg-type]
        except BaseException as error:
            self.errors.append(error)
            meeting.leave()

    def __enter__(self) -> Bench:
        return self.bench

    def __exit__(self, *problem: object) -> None:
        self.followers.end()
        for thread in self._threads:
            thread.join(60)
        if self.errors:
            raise self.errors[0]
