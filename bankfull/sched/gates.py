"""Admission gates: how many waiting sequences a policy may admit in a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from bankfull.config import SchedConfig
from bankfull.errors import ConfigError


class Gate(Protocol):
    def open(self, waiting: int, first_queued: float, running: int, now: float, sealed: bool) -> int:
        """Sequences that may be admitted now, out of `waiting` that never ran. `first_queued` is the time at which the
        oldest of them arrived; `sealed` means that no more will arrive."""
        ...

    def admitted(self) -> None:
        """A sequence was admitted for the first time."""
        ...

    def wake_at(self, waiting: int, first_queued: float) -> float | None:
        """The time at which `open` may return more although nothing arrives or leaves; None if only that helps."""
        ...


class Continuous:
    """Continuous batching: the batch is formed anew at every step."""

    def open(self, waiting: int, first_queued: float, running: int, now: float, sealed: bool) -> int:
        return waiting

    def admitted(self) -> None:
        pass

    def wake_at(self, waiting: int, first_queued: float) -> float | None:
        return None


class Static:
    """Static batching: a full batch starts together and runs to its end. The last batch of a sealed queue may be
    incomplete."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.left = 0
        """Members of the current batch that were not admitted yet."""

    def open(self, waiting: int, first_queued: float, running: int, now: float, sealed: bool) -> int:
        if not running and not self.left and self.ready(waiting, first_queued, now, sealed):
            self.left = self.size
        # A member that was aborted while it waited leaves no seat to a later arrival.
        self.left = min(self.left, waiting)
        return self.left

    def admitted(self) -> None:
        self.left = max(0, self.left - 1)

    def ready(self, waiting: int, first_queued: float, now: float, sealed: bool) -> bool:
        return waiting >= self.size or (sealed and waiting > 0)

    def wake_at(self, waiting: int, first_queued: float) -> float | None:
        return None


class Dynamic(Static):
    """Dynamic batching: as static, but an incomplete batch starts when its first request has waited `delay` seconds."""

    def __init__(self, size: int, delay: float) -> None:
        super().__init__(size)
        self.delay = delay

    def ready(self, waiting: int, first_queued: float, now: float, sealed: bool) -> bool:
        return super().ready(waiting, first_queued, now, sealed) or (waiting > 0 and now >= first_queued + self.delay)

    def wake_at(self, waiting: int, first_queued: float) -> float | None:
        return first_queued + self.delay if waiting else None


GATES: dict[str, Callable[[SchedConfig], Gate]] = {
    "continuous": lambda config: Continuous(),
    "static": lambda config: Static(config.batch_size),
    "dynamic": lambda config: Dynamic(config.batch_size, config.batch_delay),
}
"""By the value of `SchedConfig.batching`."""


def gate_of(config: SchedConfig) -> Gate:
    made = GATES.get(config.batching)
    if made is None:
        raise ConfigError(f"batching={config.batching!r} is unknown; use one of {', '.join(GATES)}.")
    return made(config)
