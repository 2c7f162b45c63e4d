"""Instruments on an engine that runs: time inside launched work, the steps' shapes, and which code was bound."""

from __future__ import annotations

from collections.abc import Callable, Collection
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from bankfull.decode.strategy import Head
from bankfull.engine import Engine
from bankfull.limits.step import StepShape
from bankfull.ops.registry import BODY, Kit
from bankfull.runtime.device import Device, Future
from bankfull.runtime.forward import Eager, Forward
from bankfull.sample.table import Chooser
from bankfull.types import StepPlan

if TYPE_CHECKING:
    from bankfull.ops.native.tape import Tape

T = TypeVar("T")


class TimedDevice:
    """A device that also sums up the time inside the work that it is given: two clock readings per launch.

    Only where work runs when it is launched is that the work's own time; elsewhere it is the time to enqueue it.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.kind, self.torch, self.depth = device.kind, device.torch, device.depth
        self.inside = 0.0

    def launch(self, work: Callable[[], T]) -> Future[T]:
        def timed() -> T:
            begun = perf_counter()
            try:
                return work()
            finally:
                self.inside += perf_counter() - begun

        return self._device.launch(timed)

    def capture(self, forward: Eager, kit: Kit) -> Forward:
        return self._device.capture(forward, kit)

    def settle(self, memory: Tensor) -> None:
        self._device.settle(memory)

    def chooser(self, kit: Kit) -> Chooser | None:
        return self._device.chooser(kit)

    def completed(self, transfers: list[int]) -> list[int]:
        return self._device.completed(transfers)

    def free_memory(self) -> int:
        return self._device.free_memory()


class TimedHead:
    """A head that sums up the time inside its kernels."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self.inside = 0.0

    def __call__(self, hidden: Tensor) -> Tensor:
        begun = perf_counter()
        logits = self.head(hidden)
        self.inside += perf_counter() - begun
        return logits

    def best(self, hidden: Tensor) -> Tensor:
        begun = perf_counter()
        tokens = self.head.best(hidden)
        self.inside += perf_counter() - begun
        return tokens


class Watched:
    """An engine under instruments; within the block only."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._device, self._head = engine.runner.device, engine.runner.model.head
        self.timed, self.timed_head = TimedDevice(self._device), TimedHead(self._head)
        self.tape: Tape | None = getattr(engine.runner.run_model, "tape", None)
        self._shapes: list[StepShape] = []

    def __enter__(self) -> Watched:
        self._engine.runner.device = self.timed
        self._engine.runner.model.head = self.timed_head
        self._engine.watchers.append(self._note)
        return self

    def __exit__(self, *problem: object) -> None:
        self._engine.runner.device = self._device
        self._engine.runner.model.head = self._head
        self._engine.watchers.remove(self._note)

    def _note(self, plan: StepPlan) -> None:
        if plan.work:
            self._shapes.append(StepShape.of(plan.work))

    def take_shapes(self) -> list[StepShape]:
        """The steps since the last call."""
        taken, self._shapes = self._shapes, []
        return taken

    @property
    def inside(self) -> float:
        """Seconds inside kernels so far: the tape's and the head's; without a tape, inside launched work."""
        return self.timed.inside if self.tape is None else self.tape.seconds + self.timed_head.inside


Bindings = dict[str, dict[str, int]]
"""Operation -> provider -> how many places of the model call it."""


def bindings(kit: Kit, ran: Collection[str]) -> Bindings:
    """What the model's layers were bound to, for the operations that `ran`: some are bound for what never happens."""
    return {name: dict(kit.chosen[name]) for name in sorted(kit.chosen) if name in ran}


def breaks(found: Bindings) -> int:
    """Places that leave the kernels for a torch body."""
    return sum(providers.get(BODY, 0) for providers in found.values())
