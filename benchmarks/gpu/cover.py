"""How much of a run's time the device had nothing to do: its own clock, read around everything it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Protocol, TypeVar

import torch

from bankfull.engine import Engine
from bankfull.runtime.device import Device, Future

T = TypeVar("T")


class Mark(Protocol):
    def until(self, later: Any) -> float:
        """Seconds from this mark to a later one."""
        ...


class HostMark:
    """For work that runs when it is launched."""

    def __init__(self) -> None:
        self._at = perf_counter()

    def until(self, later: HostMark) -> float:
        return later._at - self._at


class DeviceMark:
    """Passed by the device when it has done all that was enqueued before."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def until(self, later: DeviceMark) -> float:
        return float(self._event.elapsed_time(later._event)) / 1e3


class Covered:
    """A device that notes when it begins and ends each launch; for the rest it is the device that it stands for."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._mark: Callable[[], Any] = HostMark if device.kind == "cpu" else DeviceMark
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
        """From the first launch to the last: the part between launches, in which the device waited for the host."""
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
