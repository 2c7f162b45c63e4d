"""The share of a run in which the device was idle, from the device's clock around every launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from bankfull.engine import Engine
from bankfull.limits.explain.instruments import clock_of
from bankfull.runtime.device import Device, Future

T = TypeVar("T")


class Covered:
    """A device that records the begin and end of each launch, and otherwise delegates to the real one."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._mark = clock_of(device)
        self.spans: list[tuple[Any, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def launch(self, work: Callable[[], T]) -> Future[T]:
        def noted() -> T:
            begin = self._mark()
            try:
                return work()
            finally:
                self.spans.append((begin, self._mark()))

        return self._device.launch(noted)

    def idle_share(self) -> float:
        """Share of the time from the first launch to the last in which the device waited for the host."""
        if self._device.kind != "cpu":
            torch.cuda.synchronize(self._device.torch)
        whole = self.spans[0][0].until(self.spans[-1][1])
        inside = sum(begin.until(end) for begin, end in self.spans)
        return max(0.0, 1.0 - inside / whole)


@contextmanager
def covered(engine: Engine) -> Iterator[Covered]:
    device = engine.runner.device
    watched = Covered(device)
    engine.runner.device = watched
    try:
        yield watched
    finally:
        engine.runner.device = device
