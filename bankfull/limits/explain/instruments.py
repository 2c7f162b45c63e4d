"""Instruments for a running engine: time inside kernels, the shapes of steps, and which kernels were bound.

They observe through the hooks of engine and runner; nothing on the engine is replaced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from bankfull.engine import Engine
from bankfull.limits.meter.metered import HEAD
from bankfull.limits.meter.step import StepShape
from bankfull.ops.registry import BODY, Kit
from bankfull.runtime.device import Device
from bankfull.runtime.device_runner import DeviceRunner
from bankfull.types import StepPlan, StepResult

if TYPE_CHECKING:
    from bankfull.limits.explain.kernel_profile import Spent
    from bankfull.runtime.taped import Taped


class HostClock:
    """A mark for work that runs when it is launched."""

    def __init__(self) -> None:
        self.at = perf_counter()

    @property
    def passed(self) -> bool:
        return True

    def until(self, later: HostClock) -> float:
        return later.at - self.at


class DeviceClock:
    """A mark in the device's queue: passed when the device has done everything that was launched before."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    @property
    def passed(self) -> bool:
        return bool(self.event.query())

    def until(self, later: DeviceClock) -> float:
        return float(self.event.elapsed_time(later.event)) / 1e3


def clock_of(device: Device) -> Callable[[], Any]:
    """The kind of marks whose distance in seconds this device can measure."""
    return DeviceClock if device.kind == "cuda" else HostClock


class TimedSpans:
    """Sum of time spans that the device may not have completed yet."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._open: deque[tuple[Any, Any]] = deque()

    def add(self, begun: Any, ended: Any) -> None:
        self._open.append((begun, ended))

    @property
    def seconds(self) -> float:
        """Seconds of the completed spans."""
        while self._open and self._open[0][1].passed:
            begun, ended = self._open.popleft()
            self._sum += begun.until(ended)
        return self._sum


class LaunchTimes:
    """Observes a runner: seconds inside launched work by the device's clock, and inside the head by the host's."""

    def __init__(self, device: Device) -> None:
        self.head_seconds, self.head_calls = 0.0, 0
        self._clock = clock_of(device)
        self._launched, self._drafted = TimedSpans(), TimedSpans()

    @contextmanager
    def around_launch(self) -> Iterator[None]:
        begun = self._clock()
        try:
            yield
        finally:
            self._launched.add(begun, self._clock())

    @contextmanager
    def around_drafting(self) -> Iterator[None]:
        begun = self._clock()
        yield
        self._drafted.add(begun, self._clock())

    @contextmanager
    def around_head(self) -> Iterator[None]:
        begun = perf_counter()
        yield
        self.head_seconds += perf_counter() - begun
        self.head_calls += 1

    @property
    def seconds(self) -> float:
        """Seconds inside the completed launches so far."""
        return self._launched.seconds

    @property
    def drafting(self) -> float:
        """The part of them in which the strategy drafted."""
        return self._drafted.seconds


class KernelTimes:
    """Seconds inside an engine's kernels, counted between `open` and `close`."""

    def __init__(self, engine: Engine[DeviceRunner]) -> None:
        self._runner, self.taped = engine.runner, taped_of(engine)
        self._launches = LaunchTimes(engine.runner.device)
        self._taken = (0.0, 0)
        """Seconds and calls of the head at the last `take`."""

    def open(self) -> None:
        self._runner.observers.append(self._launches)

    def close(self) -> None:
        self._runner.observers.remove(self._launches)

    @property
    def seconds(self) -> float:
        """Seconds so far: the tape's and the head's; without a tape, those inside launched work."""
        if self.taped is None:
            return self._launches.seconds
        return self.taped.tape.seconds + self._launches.head_seconds

    @property
    def drafting(self) -> float:
        """Seconds so far in which a strategy drafted on the device."""
        return self._launches.drafting

    @contextmanager
    def by_kernel(self) -> Iterator[None]:
        """Within the block every kernel of the tape is timed, for `take`; without a tape nothing is."""
        if self.taped is None:
            yield
            return
        self.taped.timed = True
        self.take()
        try:
            yield
        finally:
            self.taped.timed = False

    def take(self) -> Spent:
        """What the tape's kernels, its breaks and the head took since the last call; empty where none is timed."""
        if self.taped is None or not self.taped.timed:
            return {}
        spent = self.taped.tape.times()
        (seconds, calls), launches = self._taken, self._launches
        self._taken = (launches.head_seconds, launches.head_calls)
        if launches.head_calls > calls:
            on_tape = spent.get(HEAD, (0.0, 0))
            spent[HEAD] = (on_tape[0] + launches.head_seconds - seconds, on_tape[1] + launches.head_calls - calls)
        return spent


@dataclass(frozen=True, slots=True)
class TapeSummary:
    """A step that is captured on a tape."""

    kernels: int
    breaks: dict[str, int]
    """Operation -> places at which the tape stops for its torch body."""


class EngineWatch:
    """Observes an engine within a block: the shapes of its steps, and the time inside its kernels."""

    def __init__(self, engine: Engine[DeviceRunner]) -> None:
        self._engine, self.times = engine, KernelTimes(engine)
        self._shapes: dict[int, StepShape] = {}
        """Shapes of steps by the number of the step, in the order of their launch."""
        self._landed: set[int] = set()

    def __enter__(self) -> EngineWatch:
        self.times.open()
        self._engine.on_launch.append(self._note)
        self._engine.on_settle.append(self._settle)
        return self

    def __exit__(self, *problem: object) -> None:
        self.times.close()
        self._engine.on_launch.remove(self._note)
        self._engine.on_settle.remove(self._settle)

    def _note(self, plan: StepPlan) -> None:
        if plan.work:
            self._shapes[plan.step] = StepShape.of(plan.work)

    def _settle(self, plan: StepPlan, result: StepResult) -> None:
        self._landed.add(plan.step)

    def take_shapes(self, *, landed: bool = False) -> list[StepShape]:
        """The steps that were launched and not taken yet; `landed`: only those whose results have arrived. A loop that
        runs ahead has launched the next step before it sees the results of the one before."""
        numbers = [number for number in self._shapes if number in self._landed or not landed]
        self._landed.clear()
        return [self._shapes.pop(number) for number in numbers]

    @property
    def tape(self) -> TapeSummary | None:
        taped = self.times.taped
        return None if taped is None else TapeSummary(len(taped.tape), taped.tape.breaks)


def taped_of(engine: Engine[DeviceRunner]) -> Taped | None:
    """The engine's step on a tape, if it has one."""
    run: Any = engine.runner.run_model
    return run if hasattr(run, "tape") else None


Bindings = dict[str, dict[str, int]]
"""Operation -> provider -> number of places in the model that call it."""


def bindings(kit: Kit, ran: Collection[str]) -> Bindings:
    """The providers that the model's layers were bound to, for the operations that `ran`: some never run."""
    return {name: dict(kit.chosen[name]) for name in sorted(kit.chosen) if name in ran}


def breaks(found: Bindings) -> int:
    """Places that call a torch body instead of a kernel."""
    return sum(providers.get(BODY, 0) for providers in found.values())
