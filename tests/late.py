"""A fake asynchronous device: it runs launched work as late as a device may. Tests run the whole loop on it.

Work runs some time after its launch, at the latest when the host waits for it or for later work. The completion of a
transfer is reported steps late. Code that reads a device value too early gets the old value.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from bankfull.ops.registry import Kit
from bankfull.runtime.device import (
    Copier,
    Copying,
    Cpu,
    Future,
    Pairs,
    choosing_on_tape,
    copy_now,
    record_on_tape,
)
from bankfull.runtime.forward import ChoosingStep, Eager, Forward
from bankfull.runtime.rows import Rows, Ship

T = TypeVar("T")


class Late(Cpu):
    depth = 1
    suits = {"rows": 64, "step_tokens": 512}  # type: ignore[assignment] # noqa: RUF012

    def __init__(self, seed: int = 0, apart: bool = False) -> None:
        """`apart`: as if its memory were not the host's. Arrays are copied to the device, and only the device knows
        its rows' lengths."""
        super().__init__()
        self.apart = apart
        self._random = random.Random(seed)
        self._queue: deque[_Task[Any]] = deque()
        self._moving: list[int] = []

    def launch(self, work: Callable[[], T]) -> Future[T]:
        task = _Task(self, work)
        self._queue.append(task)
        for _ in range(self._random.choice((0, 0, 0, 1, 2))):
            self._run_one()
        return task

    def capture(self, forward: Eager, kit: Kit) -> Forward:
        return record_on_tape(forward, kit)

    def choosing(self, forward: Forward, rows: Rows) -> ChoosingStep | None:
        return None if self.apart else choosing_on_tape(forward, rows)

    @property
    def ship(self) -> Ship | None:
        return (lambda array: torch.from_numpy(array.copy())) if self.apart else None

    def completed(self, transfers: list[int]) -> list[int]:
        self._moving += transfers
        # Every transfer is reported in the end: a step without transfers of its own reports the rest.
        done = len(self._moving) if not transfers else self._random.randint(0, len(self._moving))
        reported, self._moving = self._moving[:done], self._moving[done:]
        return reported

    def copier(self) -> Copier:
        return LateCopier(self._random)

    def _run_one(self) -> None:
        if self._queue:
            self._queue.popleft().run()

    def run_until(self, task: _Task[Any]) -> None:
        while not task.done:
            self._run_one()


class LateCopier:
    def __init__(self, random: random.Random) -> None:
        self._random = random

    def copy(self, pairs: Pairs, down: bool) -> Copying:
        return LateCopies(pairs, self._random.randint(0, 6))


class LateCopies:
    """Happens when it was asked for often enough, or waited for."""

    def __init__(self, pairs: Pairs, left: int) -> None:
        self._pairs, self._left = pairs, left

    def done(self) -> bool:
        self._left -= 1
        if self._left >= 0:
            return False
        self.wait(None)
        return True

    def wait(self, seconds: float | None) -> None:
        if seconds is None or self._left < 0:
            copy_now(self._pairs)
            self._pairs, self._left = (), -1

    def seconds(self) -> float:
        return 1e-3


class _Task(Future[T]):
    def __init__(self, device: Late, work: Callable[[], T]) -> None:
        self._device, self._work = device, work
        self._value: T | None = None
        self.done = False

    def run(self) -> None:
        with torch.inference_mode():
            self._value = self._work()
        self.done = True

    def wait(self) -> T:
        self._device.run_until(self)
        return self._value  # type: ignore[return-value]
