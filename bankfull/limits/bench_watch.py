"""Instruments on an engine that runs: time inside launched work, the steps' shapes, and which code was bound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from time import perf_counter
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar

import torch

from bankfull.engine import Engine
from bankfull.limits.step import StepShape
from bankfull.ops.registry import BODY, OPERATIONS
from bankfull.runtime.device import Device, Future
from bankfull.types import StepPlan

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

    def completed(self, transfers: list[int]) -> list[int]:
        return self._device.completed(transfers)

    def free_memory(self) -> int:
        return self._device.free_memory()


class Watched:
    """An engine under instruments; within the block only."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._device = engine.runner.device
        self.timed = TimedDevice(self._device)
        self._shapes: list[StepShape] = []

    def __enter__(self) -> Watched:
        self._engine.runner.device = self.timed
        self._engine.watchers.append(self._note)
        return self

    def __exit__(self, *problem: object) -> None:
        self._engine.runner.device = self._device
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
        """Seconds inside launched work so far."""
        return self.timed.inside


Bindings = dict[str, dict[str, int]]
"""Operation -> provider -> how many places of the model call it."""


def bindings(model: object, ran: Collection[str]) -> Bindings:
    """What the layers of a built model were bound to, counted, for the operations that `ran`.

    Found in the layers themselves and in what their functions close over.
    """
    names = {id(operation.body): (name, BODY) for name, operation in OPERATIONS.items()}
    names |= {id(p.run): (name, p.name) for name, operation in OPERATIONS.items() for p in operation.providers.values()}
    counted: Counter[tuple[str, str]] = Counter()
    seen: set[int] = set()
    waiting = [model]
    while waiting:
        for part in _parts(waiting.pop()):
            if id(part) in names:
                counted[names[id(part)]] += 1  # once for each holder
            elif id(part) not in seen and not isinstance(part, torch.Tensor | str | bytes | int | float | type | None):
                seen.add(id(part))
                waiting.append(part)
    found: Bindings = {}
    for (name, provider), count in sorted(counted.items()):
        if name in ran:
            found.setdefault(name, {})[provider] = count
    return found


def breaks(found: Bindings) -> int:
    """Places that leave the kernels for a torch body."""
    return sum(providers.get(BODY, 0) for providers in found.values())


_EMPTY = CellType()


def _parts(at: Any) -> list[Any]:
    if isinstance(at, dict):
        return list(at.values())
    if isinstance(at, list | tuple | set | frozenset):
        return list(at)
    if isinstance(at, FunctionType):  # its globals are not the model's
        return [cell.cell_contents for cell in at.__closure__ or () if cell != _EMPTY]
    if isinstance(at, MethodType):
        return [at.__self__]
    if isinstance(at, partial):
        return [at.func, *at.args, *at.keywords.values()]
    own = list(vars(at).values()) if hasattr(at, "__dict__") else []
    slots = [name for kind in type(at).__mro__ for name in getattr(kind, "__slots__", ())]
    return own + [getattr(at, name) for name in slots if hasattr(at, name)]
