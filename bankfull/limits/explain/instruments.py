"""Instruments on an engine that runs: time inside launched work, the steps' shapes, and which code was bound."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from bankfull.decode.strategy import Head
from bankfull.engine import Engine
from bankfull.limits.meter.metered import HEAD
from bankfull.limits.meter.step import StepShape
from bankfull.ops.registry import BODY, Kit
from bankfull.runtime.device import Device, Future
from bankfull.runtime.forward import ChoosingStep, Eager, Forward
from bankfull.runtime.rows import Rows, Ship
from bankfull.sample.table import Chooser
from bankfull.types import StepPlan

if TYPE_CHECKING:
    from bankfull.limits.explain.kernel_profile import Spent
    from bankfull.ops.native.tape import Tape
    from bankfull.runtime.taped import Taped

T = TypeVar("T")


class HostClock:
    """For work that runs when it is launched."""

    def __init__(self) -> None:
        self.at = perf_counter()

    @property
    def passed(self) -> bool:
        return True

    def until(self, later: HostClock) -> float:
        return later.at - self.at


class DeviceClock:
    """A mark in the device's own queue: passed when it has done all that was launched before."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    @property
    def passed(self) -> bool:
        return bool(self.event.query())

    def until(self, later: DeviceClock) -> float:
        return float(self.event.elapsed_time(later.event)) / 1e3


def clock_of(device: Device) -> Callable[[], Any]:
    """Makes marks of the time at which a device passes them; two of one kind tell the seconds between them."""
    return DeviceClock if device.kind == "cuda" else HostClock


class TimedDevice:
    """A device that also sums up the time inside the work that it is given, by its own clock."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.kind, self.torch, self.depth = device.kind, device.torch, device.depth
        self.suits, self.share = device.suits, device.share
        self._clock, self._sum = clock_of(device), 0.0
        self._spans: deque[tuple[Any, Any]] = deque()

    def launch(self, work: Callable[[], T]) -> Future[T]:
        def timed() -> T:
            begun = self._clock()
            try:
                return work()
            finally:
                self._spans.append((begun, self._clock()))

        return self._device.launch(timed)

    @property
    def inside(self) -> float:
        """Seconds so far, of the launches that are done."""
        while self._spans and self._spans[0][1].passed:
            begun, ended = self._spans.popleft()
            self._sum += begun.until(ended)
        return self._sum

    def compile_ahead(self, steps: Iterable[Callable[[], object]], kit: Kit) -> None:
        self._device.compile_ahead(steps, kit)

    def capture(self, forward: Eager, kit: Kit) -> Forward:
        return self._device.capture(forward, kit)

    def choosing(self, forward: Forward, rows: Rows) -> ChoosingStep | None:
        return self._device.choosing(forward, rows)

    def chooser(self, kit: Kit) -> Chooser | None:
        return self._device.chooser(kit)

    @property
    def ship(self) -> Ship | None:
        return self._device.ship

    def fetch(self, tensor: Tensor) -> Tensor:
        return self._device.fetch(tensor)

    def completed(self, transfers: list[int]) -> list[int]:
        return self._device.completed(transfers)

    def free_memory(self) -> int:
        return self._device.free_memory()

    def peak(self, work: Callable[[], object]) -> int:
        return self._device.peak(work)


class TimedHead:
    """A head that sums up the time inside its kernels."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self.inside, self.runs = 0.0, 0

    def __call__(self, hidden: Tensor) -> Tensor:
        begun = perf_counter()
        logits = self.head(hidden)
        self._note(begun)
        return logits

    def best(self, hidden: Tensor) -> Tensor:
        begun = perf_counter()
        tokens = self.head.best(hidden)
        self._note(begun)
        return tokens

    def _note(self, begun: float) -> None:
        self.inside += perf_counter() - begun
        self.runs += 1


@dataclass(frozen=True, slots=True)
class Captured:
    """A step on its tape."""

    kernels: int
    breaks: dict[str, int]
    """Operation -> how often the tape stops for its torch body."""


class Watched:
    """An engine under instruments; within the block only."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._device, self._head = engine.runner.device, engine.runner.model.head
        self.timed, self.timed_head = TimedDevice(self._device), TimedHead(self._head)
        self._taped = taped_of(engine)
        self._shapes: dict[int, StepShape] = {}
        """By the number of the step, in the order of their launch."""
        self._landed: set[int] = set()
        self._head_before = (0.0, 0)

    def __enter__(self) -> Watched:
        self._engine.runner.device = self.timed
        self._engine.runner.model.head = self.timed_head
        self._engine.watchers.append(self._note)
        self._engine.settled.append(self._settle)
        return self

    def __exit__(self, *problem: object) -> None:
        self._engine.runner.device = self._device
        self._engine.runner.model.head = self._head
        self._engine.watchers.remove(self._note)
        self._engine.settled.remove(self._settle)

    def _note(self, plan: StepPlan) -> None:
        if plan.work:
            self._shapes[plan.step] = StepShape.of(plan.work)

    def _settle(self, plan: StepPlan) -> None:
        self._landed.add(plan.step)

    def take_shapes(self, *, landed: bool = False) -> list[StepShape]:
        """The steps that were launched and not taken yet; `landed`: only those whose results are there. A loop that
        runs ahead has launched the next step before it sees what the one before gave."""
        numbers = [number for number in self._shapes if number in self._landed or not landed]
        self._landed.clear()
        return [self._shapes.pop(number) for number in numbers]

    @property
    def inside(self) -> float:
        """Seconds inside kernels so far: the tape's and the head's; without a tape, inside launched work."""
        return self.timed.inside if self._taped is None else self._taped.tape.seconds + self.timed_head.inside

    @property
    def captured(self) -> Captured | None:
        return None if self._taped is None else Captured(len(self._taped.tape), self._taped.tape.breaks)

    @contextmanager
    def timing_kernels(self) -> Iterator[Tape]:
        """Within the block every kernel of the tape is timed; there must be one."""
        assert self._taped is not None
        self._taped.timed = True
        self.take_spent()
        try:
            yield self._taped.tape
        finally:
            self._taped.timed = False

    def take_spent(self) -> Spent:
        """What the tape's kernels, its breaks and the head took since the last call."""
        assert self._taped is not None
        seconds, runs = self._head_before
        self._head_before = (self.timed_head.inside, self.timed_head.runs)
        found = self._taped.tape.times()
        if self.timed_head.runs > runs:
            on_tape = found.get(HEAD, (0.0, 0))
            found[HEAD] = (on_tape[0] + self.timed_head.inside - seconds, on_tape[1] + self.timed_head.runs - runs)
        return found


def taped_of(engine: Engine) -> Taped | None:
    """The engine's captured step, if it has one."""
    run: Any = engine.runner.run_model
    return run if hasattr(run, "tape") else None


Bindings = dict[str, dict[str, int]]
"""Operation -> provider -> how many places of the model call it."""


def bindings(kit: Kit, ran: Collection[str]) -> Bindings:
    """What the model's layers were bound to, for the operations that `ran`: some are bound for what never happens."""
    return {name: dict(kit.chosen[name]) for name in sorted(kit.chosen) if name in ran}


def breaks(found: Bindings) -> int:
    """Places that leave the kernels for a torch body."""
    return sum(providers.get(BODY, 0) for providers in found.values())
