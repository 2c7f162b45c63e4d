"""A fake asynchronous device: it runs launched work as late as a device may. Tests run the whole loop on it.

Work runs some time after its launch, at the latest when the host waits for it or for later work. The completion of a
transfer is reported steps late. Code that reads a device value too early gets the old value.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from bankfull.ops.registry import Kit
from bankfull.runtime.device import (
    Copier,
    Copying,
    CopyNow,
    Cpu,
    Future,
    MoveTokens,
    Pairs,
    choosing_on_tape,
    copy_now,
    native_chooser,
    record_on_tape,
)
from bankfull.runtime.forward import ChoosingStep, Eager, Forward, VerifyingStep
from bankfull.runtime.host import available_memory
from bankfull.runtime.marks import HostMark
from bankfull.runtime.rows import Rows, Ship
from bankfull.sample.table import Chooser
from bankfull.state.storage import Storage

T = TypeVar("T")


class Late:
    kind = "cpu"
    depth = 1
    suits, share = {"rows": 64, "step_tokens": 512}, Cpu.share

    def __init__(self, seed: int = 0, apart: bool = False) -> None:
        """`apart`: as if its memory were not the host's. Arrays are copied to the device, and only the device knows
        its rows' lengths."""
        self.apart = apart
        self.torch = torch.device("cpu")
        self._random = random.Random(seed)
        self._queue: deque[_Task[Any]] = deque()
        self._moving: list[int] = []

    def launch(self, work: Callable[[], T]) -> Future[T]:
        task = _Task(self, work)
        self._queue.append(task)
        for _ in range(self._random.choice((0, 0, 0, 1, 2))):
            self._run_one()
        return task

    def compile_ahead(self, steps: Iterable[Callable[[], object]], kit: Kit) -> None:
        pass

    def capture(self, forward: Eager, kit: Kit) -> Forward:
        return record_on_tape(forward, kit)

    def choosing(self, forward: Forward, rows: Rows) -> ChoosingStep | None:
        return None if self.apart else choosing_on_tape(forward, rows)

    def verifying(self, forward: Forward, rows: Rows, storage: Storage, move: MoveTokens) -> VerifyingStep | None:
        return None

    def chooser(self, kit: Kit) -> Chooser | None:
        return native_chooser(kit)

    @property
    def ship(self) -> Ship | None:
        return (lambda array: torch.from_numpy(array.copy())) if self.apart else None

    def fetch(self, tensor: Tensor) -> Tensor:
        return tensor

    def completed(self, transfers: list[int]) -> list[int]:
        self._moving += transfers
        # Every transfer is reported in the end: a step without transfers of its own reports the rest.
        done = len(self._moving) if not transfers else self._random.randint(0, len(self._moving))
        reported, self._moving = self._moving[:done], self._moving[done:]
        return reported

    def copier(self) -> Copier:
        return LateCopier(self._random)

    def blocking_copy(self) -> CopyNow:
        return copy_now

    def host_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def free_memory(self) -> int:
        return available_memory()

    def mark(self) -> HostMark:
        return HostMark(time.perf_counter())

    def peak(self, work: Callable[[], object]) -> int:
        return 0

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
