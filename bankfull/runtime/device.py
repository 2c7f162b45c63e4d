"""The seam to a device: the only place that says stream, event, pinned, capture."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from bankfull.config import cpu_step_tokens
from bankfull.errors import ConfigError
from bankfull.ops import native
from bankfull.ops.registry import Kit
from bankfull.runtime.forward import ChoosingForward, ChoosingStep, Eager, Forward
from bankfull.runtime.rows import Rows, Ship
from bankfull.sample.table import Chooser

log = logging.getLogger("bankfull")

MOST_COMPILERS = 16
"""Threads that compile kernels: each may take some hundred megabytes, and a model has about fifty kernels."""

T = TypeVar("T")
Value = TypeVar("Value", covariant=True)


class Future(Protocol[Value]):
    def wait(self) -> Value:
        """Block until the work is done; its value."""
        ...


class Device(Protocol):
    kind: str
    torch: torch.device
    depth: int
    """The loop depth that suits this device."""
    share: float
    """Of the free memory: what the pools take unless told otherwise."""

    @property
    def suits(self) -> dict[str, int]:
        """Rows and tokens of a step that suit it, under the names of SchedConfig."""
        ...

    def launch(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` after everything that was launched before; the host does not wait for it."""
        ...

    def compile_ahead(self, steps: Iterable[Callable[[], object]], kit: Kit) -> None:
        """Have what these steps launch ready to be launched, where the device compiles its kernels. Nothing runs."""
        ...

    def capture(self, forward: Eager, kit: Kit) -> Forward:
        """The same computation in fewer launches, where the device can; else `forward` itself."""
        ...

    def choosing(self, forward: Forward, rows: Rows) -> ChoosingStep | None:
        """A captured step that chooses tokens too, if there is one: for the rows that `Rows.is_simple` tells."""
        ...

    def chooser(self, kit: Kit) -> Chooser | None:
        """A kernel that draws tokens, if there is one."""
        ...

    @property
    def ship(self) -> Ship | None:
        """How arrays reach the device without waiting for it; None where it shares the host's memory."""
        ...

    def fetch(self, tensor: Tensor) -> Tensor:
        """The tensor on the host, filled once the launched work around this call has been waited for."""
        ...

    def completed(self, transfers: list[int]) -> list[int]:
        """Called when the step that carried `transfers` is collected: all transfers that are done by now."""
        ...

    def free_memory(self) -> int: ...

    def peak(self, work: Callable[[], object]) -> int:
        """Bytes that `work` takes at its height and gives back; 0 where nobody knows or cares."""
        ...


class Done(Generic[T]):
    def __init__(self, value: T) -> None:
        self._value = value

    def wait(self) -> T:
        return self._value


class Cpu:
    """Runs at once on the caller's thread: on a small machine a second busy thread only steals from the kernels."""

    kind = "cpu"
    depth = 0
    share = 0.4

    def __init__(self) -> None:
        self.torch = torch.device("cpu")

    @property
    def suits(self) -> dict[str, int]:
        return {"rows": 64, "step_tokens": cpu_step_tokens(native.threads())}

    def launch(self, work: Callable[[], T]) -> Future[T]:
        with torch.inference_mode():
            return Done(work())

    def compile_ahead(self, steps: Iterable[Callable[[], object]], kit: Kit) -> None:
        pass  # its kernels come compiled

    def capture(self, forward: Eager, kit: Kit) -> Forward:
        return record_on_tape(forward, kit)

    def choosing(self, forward: Forward, rows: Rows) -> ChoosingStep | None:
        return choosing_on_tape(forward, rows)

    def chooser(self, kit: Kit) -> Chooser | None:
        return native_chooser(kit)

    @property
    def ship(self) -> Ship | None:
        return None

    def fetch(self, tensor: Tensor) -> Tensor:
        return tensor

    def completed(self, transfers: list[int]) -> list[int]:
        return transfers

    def free_memory(self) -> int:
        return available_memory()

    def peak(self, work: Callable[[], object]) -> int:
        return 0  # the share leaves room enough, and starting should not take a step's time


class Cuda:
    """Launching enqueues on a stream of our own; `wait` waits for the event behind the work."""

    kind = "cuda"
    depth = 1
    suits: dict[str, int] = {"rows": 256, "step_tokens": 8192}  # noqa: RUF012
    share = 0.95

    def __init__(self, index: int = 0) -> None:
        self.torch = torch.device("cuda", index)
        self.stream = torch.cuda.Stream(self.torch)

    def launch(self, work: Callable[[], T]) -> Future[T]:
        with self.here():
            value = work()
            event = torch.cuda.Event()
            event.record()
        return _Event(value, event)

    @contextmanager
    def here(self) -> Iterator[None]:
        with torch.inference_mode(), torch.cuda.device(self.torch), torch.cuda.stream(self.stream):
            yield

    def compile_ahead(self, steps: Iterable[Callable[[], object]], kit: Kit) -> None:
        threads = min(MOST_COMPILERS, usable_cores())
        if threads == 1 or not kit.prefer:
            return
        from bankfull.ops.triton.ahead import compiling_ahead

        torch.cuda.synchronize(self.torch)  # weights were made on another stream
        with self.here(), compiling_ahead(self.torch, threads):
            for step in steps:
                step()
        torch.cuda.synchronize(self.torch)

    def capture(self, forward: Eager, kit: Kit) -> Forward:
        from bankfull.runtime.captured import Captured

        return Captured(forward) if kit.prefer else forward

    def choosing(self, forward: Forward, rows: Rows) -> ChoosingStep | None:
        from bankfull.runtime.captured import Captured

        return forward.choosing(rows) if isinstance(forward, Captured) else None

    def chooser(self, kit: Kit) -> Chooser | None:
        if not kit.prefer:
            return None
        from bankfull.ops.triton.sampling import choose

        return choose

    def ship(self, array: np.ndarray) -> Tensor:
        # Pinned memory is taken from a pool, and goes back to it when the copy has been made. numpy fills it: torch
        # would wake its threads for what is done before they are up.
        pinned = torch.empty(array.shape, dtype=torch.from_numpy(array).dtype, pin_memory=True)
        pinned.numpy()[...] = array
        return pinned.to(self.torch, non_blocking=True)

    def fetch(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)

    def completed(self, transfers: list[int]) -> list[int]:
        return transfers

    def free_memory(self) -> int:
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.torch)[0])

    def peak(self, work: Callable[[], object]) -> int:
        torch.cuda.synchronize(self.torch)  # weights were made on another stream
        self.launch(work).wait()  # compiles, and lays out what is laid out once
        torch.cuda.synchronize(self.torch)
        torch.cuda.reset_peak_memory_stats(self.torch)
        before = torch.cuda.memory_allocated(self.torch)
        self.launch(work).wait()
        torch.cuda.synchronize(self.torch)
        return int(torch.cuda.max_memory_allocated(self.torch)) - before


def record_on_tape(forward: Eager, kit: Kit) -> Forward:
    """On a tape, where there are native kernels and the model uses any of them. A model with an expression that the
    tape cannot record runs eagerly, and one line in the log names the expression."""
    from bankfull.ops import native

    if native.status() is not None or not any(counts["native"] for counts in kit.chosen.values()):
        return forward
    from bankfull.ops.native.tape.record import CannotRecord
    from bankfull.runtime.taped import Taped

    try:
        return Taped(forward, kit)
    except CannotRecord as problem:
        from bankfull.runtime.uncaptured import notice_of

        forward.uncaptured = notice_of(problem, forward, kit)
        log.warning(forward.uncaptured)
        return forward


def choosing_on_tape(forward: Forward, rows: Rows) -> ChoosingStep | None:
    return forward.choosing(rows) if isinstance(forward, ChoosingForward) else None


def native_chooser(kit: Kit) -> Chooser | None:
    from bankfull.ops import native

    if native.status() is not None or "native" not in kit.prefer:
        return None
    from bankfull.ops.native.sampling import choose

    return choose


class _Event(Generic[T]):
    def __init__(self, value: T, event: torch.cuda.Event) -> None:
        self._value, self._event = value, event

    def wait(self) -> T:
        self._event.synchronize()
        return self._value


def open_device(name: str) -> Device:
    """auto, cpu, cuda or cuda:1. Asking for what is not there is an error, never a silent fall-back."""
    if name == "auto":
        return Cuda() if torch.cuda.is_available() else Cpu()
    if name == "cpu":
        return Cpu()
    kind, _, index = name.partition(":")
    if kind != "cuda" or (index and not index.isdigit()):
        raise ConfigError(f"device={name!r} is unknown; use auto, cpu, cuda or cuda:N.")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(index or 0) >= count:
        raise ConfigError(f"device={name!r} was asked for, but torch sees {count} CUDA devices; use device='cpu'.")
    return Cuda(int(index or 0))


def spread(pages: Tensor) -> None:
    """Pages that no one has touched yet, over the memory nodes of a machine that has several."""
    if native.status() is None and pages.device.type == "cpu":
        from bankfull.ops.native.memory import over_nodes

        over_nodes(pages)


def commits(pages: Tensor) -> Callable[[int], None] | None:
    """To be told the highest page that a step will write, before it does; None where that is nobody's concern."""
    if native.status() is None and pages.device.type == "cpu":
        from bankfull.ops.native.memory import Commits

        return Commits(pages).up_to
    return None


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory() -> int:
    """Bytes that this process may still use: what the system has, within the limit of its control group."""
    page = os.sysconf("SC_PAGE_SIZE")
    free = page * os.sysconf("SC_AVPHYS_PAGES")
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        if limit != "max":
            free = min(free, max(0, int(limit) - used))
    except (OSError, ValueError):
        pass  # no control group, or an older kind
    return free
