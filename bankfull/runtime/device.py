"""Devices behind one protocol: the only file that knows streams, events, pinned memory and capture."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch import dtype as DType

from bankfull.config import CPU_SHARE, cpu_step_tokens
from bankfull.errors import ConfigError
from bankfull.ops import native
from bankfull.ops.registry import Kit
from bankfull.runtime.forward import ChoosingForward, ChoosingStep, Eager, Forward, VerifyingStep
from bankfull.runtime.host import available_memory, usable_cores
from bankfull.runtime.marks import CudaMark, HostMark, TimeMark
from bankfull.runtime.rows import Rows, Ship
from bankfull.sample.table import Chooser
from bankfull.state.storage import Storage
from bankfull.torch_parts import complete

log = logging.getLogger("bankfull")

MOST_COMPILERS = 16
"""The most threads that compile kernels: each may take some hundred megabytes, and a model has about fifty kernels."""

COPY_POLL_SECONDS = 1e-4
"""An event cannot be waited for with a time limit, so it is asked so often."""
MoveTokens = Callable[..., None]
"""The operation `move_tokens`, as the runner has bound it."""
T = TypeVar("T")
Value = TypeVar("Value", covariant=True)


class Future(Protocol[Value]):
    def wait(self) -> Value:
        """Block until the work is done; its value."""
        ...


Pairs = Sequence[tuple[Tensor, Tensor]]
"""Targets and sources of copies."""
CopyNow = Callable[[Pairs], None]


class Copying(Protocol):
    """Copies that were started together."""

    def done(self) -> bool: ...

    def wait(self, seconds: float | None) -> None:
        """Until they are done, at most this long."""
        ...

    def seconds(self) -> float:
        """The time that they took, once they are done."""
        ...


class Copier(Protocol):
    def copy(self, pairs: Pairs, down: bool) -> Copying:
        """Start copies, all from the device (`down`) or all to it. Nothing that was launched before is waited for."""
        ...


class Device(Protocol):
    kind: str
    torch: torch.device
    depth: int
    """The loop depth that suits this device."""
    share: float
    """Fraction of the free memory that the pools take by default."""

    @property
    def suits(self) -> dict[str, int]:
        """Default rows and tokens of a step, under the names of SchedConfig."""
        ...

    def launch(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` after all work launched before; the host does not wait for it."""
        ...

    def compile_ahead(self, steps: Iterable[Callable[[], object]], kit: Kit) -> None:
        """Compile the kernels that these steps launch, where the device compiles its kernels. Nothing is computed."""
        ...

    def capture(self, forward: Eager, kit: Kit) -> Forward:
        """The same computation captured, where the device and the model allow it; else `forward` itself."""
        ...

    def choosing(self, forward: Forward, rows: Rows) -> ChoosingStep | None:
        """A captured step that also chooses tokens, if there is one: for rows whose job `Rows.is_simple` accepts."""
        ...

    def verifying(self, forward: Forward, rows: Rows, storage: Storage, move: MoveTokens) -> VerifyingStep | None:
        """A captured verification of the forward's captured steps with drafts, if there is one."""
        ...

    def chooser(self, kit: Kit) -> Chooser | None:
        """A kernel that samples tokens, if there is one."""
        ...

    @property
    def ship(self) -> Ship | None:
        """Copies an array to the device without waiting for it; None where the device shares the host's memory."""
        ...

    def fetch(self, tensor: Tensor) -> Tensor:
        """The tensor on the host, valid after the launched work around this call has been waited for."""
        ...

    def completed(self, transfers: list[int]) -> list[int]:
        """The ids of all transfers that are done. Called once with the `transfers` of each step, when it settles."""
        ...

    def copier(self) -> Copier:
        """Copies between the device and the host beside the launched work."""
        ...

    def blocking_copy(self) -> CopyNow:
        """The same for a thread of its own, which waits for each copy. Called on that thread."""
        ...

    def host_memory(self, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """Uninitialized host memory that the device copies from and to at full speed."""
        ...

    def free_memory(self) -> int: ...

    def mark(self) -> TimeMark:
        """The present moment of the device's work; called within launched work."""
        ...

    def peak(self, work: Callable[[], object]) -> int:
        """Peak bytes that `work` allocates and frees; 0 where the device does not measure it."""
        ...


class Done(Generic[T]):
    def __init__(self, value: T) -> None:
        self._value = value

    def wait(self) -> T:
        return self._value


class CopiedNow:
    """Copies of a device whose memory is the host's: they are done when they were started."""

    def __init__(self, pairs: Pairs) -> None:
        begun = time.perf_counter()
        copy_now(pairs)
        self._seconds = time.perf_counter() - begun

    def done(self) -> bool:
        return True

    def wait(self, seconds: float | None) -> None:
        pass

    def seconds(self) -> float:
        return self._seconds


class CopierNow:
    def copy(self, pairs: Pairs, down: bool) -> Copying:
        return CopiedNow(pairs)


def copy_now(pairs: Pairs) -> None:
    with torch.inference_mode():
        for target, source in pairs:
            target.copy_(source)


class Cpu:
    """Runs at once on the caller's thread: on a small machine a second busy thread only steals from the kernels."""

    kind = "cpu"
    depth = 0
    share = CPU_SHARE

    def __init__(self) -> None:
        self.torch = torch.device("cpu")

    @property
    def suits(self) -> dict[str, int]:
        return {"rows": 64, "step_tokens": cpu_step_tokens(native.threads())}

    def launch(self, work: Callable[[], T]) -> Future[T]:
        with torch.inference_mode():
            return Done(work())

    def compile_ahead(self, steps: Iterable[Callable[[], object]], kit: Kit) -> None:
        pass  # native kernels are compiled at installation

    def capture(self, forward: Eager, kit: Kit) -> Forward:
        return forward if divides_tokens(forward) else record_on_tape(forward, kit)

    def choosing(self, forward: Forward, rows: Rows) -> ChoosingStep | None:
        return choosing_on_tape(forward, rows)

    def verifying(self, forward: Forward, rows: Rows, storage: Storage, move: MoveTokens) -> VerifyingStep | None:
        return None

    def chooser(self, kit: Kit) -> Chooser | None:
        return native_chooser(kit)

    @property
    def ship(self) -> Ship | None:
        return None

    def fetch(self, tensor: Tensor) -> Tensor:
        return tensor

    def completed(self, transfers: list[int]) -> list[int]:
        return transfers

    def copier(self) -> Copier:
        return CopierNow()

    def blocking_copy(self) -> CopyNow:
        return copy_now

    def host_memory(self, shape: tuple[int, ...], dtype: DType) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def free_memory(self) -> int:
        return available_memory()

    def mark(self) -> HostMark:
        return HostMark(time.perf_counter())

    def peak(self, work: Callable[[], object]) -> int:
        return 0  # `share` leaves enough room, and a measured step would delay the start


class Cuda:
    """`launch` enqueues on the engine's own stream; `wait` waits for the event after the work."""

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

        return Captured(forward) if kit.prefer and not divides_tokens(forward) else forward

    def choosing(self, forward: Forward, rows: Rows) -> ChoosingStep | None:
        from bankfull.runtime.captured import Captured

        return forward.choosing(rows) if isinstance(forward, Captured) else None

    def verifying(self, forward: Forward, rows: Rows, storage: Storage, move: MoveTokens) -> VerifyingStep | None:
        from bankfull.runtime.captured import Captured
        from bankfull.runtime.captured_verify import CapturedVerify

        if not isinstance(forward, Captured):
            return None
        step = CapturedVerify(forward, rows, storage, move)
        self.launch(step.capture).wait()
        return step

    def chooser(self, kit: Kit) -> Chooser | None:
        if not kit.prefer:
            return None
        from bankfull.ops.sampling.triton.sampling import choose

        return choose

    def ship(self, array: np.ndarray) -> Tensor:
        # Pinned memory comes from a pool and returns to it after the copy. numpy fills it, because torch would wake its
        # threads, which takes longer than the copy.
        pinned = torch.empty(array.shape, dtype=torch.from_numpy(array).dtype, pin_memory=True)
        pinned.numpy()[...] = array
        return pinned.to(self.torch, non_blocking=True)

    def fetch(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)

    def completed(self, transfers: list[int]) -> list[int]:
        return transfers

    def copier(self) -> Copier:
        return CudaCopier(self.torch)

    def blocking_copy(self) -> CopyNow:
        stream = torch.cuda.Stream(self.torch)

        def copy(pairs: Pairs) -> None:
            with torch.inference_mode(), torch.cuda.stream(stream):
                for target, source in pairs:
                    target.copy_(source, non_blocking=True)
            stream.synchronize()

        return copy

    def host_memory(self, shape: tuple[int, ...], dtype: DType) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def free_memory(self) -> int:
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.torch)[0])

    def mark(self) -> CudaMark:
        return CudaMark()

    def peak(self, work: Callable[[], object]) -> int:
        torch.cuda.synchronize(self.torch)  # weights were made on another stream
        self.launch(work).wait()  # compiles kernels, and lays out weights that are laid out once
        torch.cuda.synchronize(self.torch)
        torch.cuda.reset_peak_memory_stats(self.torch)
        before = torch.cuda.memory_allocated(self.torch)
        self.launch(work).wait()
        torch.cuda.synchronize(self.torch)
        return int(torch.cuda.max_memory_allocated(self.torch)) - before


def divides_tokens(forward: Eager) -> bool:
    """Whether ranks divide the tokens of each step, by counts and lengths that a captured step would not see. The
    forward then says so."""
    if getattr(forward.model, "share", None) is None:
        return False
    forward.uncaptured = "Steps run without capture, because ranks divide the tokens of each step."
    return True


def record_on_tape(forward: Eager, kit: Kit) -> Forward:
    """Record the forward on a tape, where there are native kernels and the model uses any of them. A model with an
    expression that the tape cannot record runs eagerly, and one line in the log names the expression."""
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
    from bankfull.ops.sampling.native import choose

    return choose


class CudaCopier:
    """One stream for each direction: the copy engines of both then work at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = {down: torch.cuda.Stream(device) for down in (True, False)}

    def copy(self, pairs: Pairs, down: bool) -> Copying:
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.inference_mode(), torch.cuda.device(self._device), torch.cuda.stream(self._streams[down]):
            begun.record()
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            ended.record()
        return CudaCopies(begun, ended)


class CudaCopies:
    def __init__(self, begun: torch.cuda.Event, ended: torch.cuda.Event) -> None:
        self._begun, self._ended = begun, ended

    def done(self) -> bool:
        return bool(self._ended.query())

    def wait(self, seconds: float | None) -> None:
        if seconds is None:
            self._ended.synchronize()
            return
        until = time.monotonic() + seconds
        while not self._ended.query() and time.monotonic() < until:
            time.sleep(COPY_POLL_SECONDS)

    def seconds(self) -> float:
        return float(self._begun.elapsed_time(self._ended)) / 1e3


class _Event(Generic[T]):
    def __init__(self, value: T, event: torch.cuda.Event) -> None:
        self._value, self._event = value, event

    def wait(self) -> T:
        self._event.synchronize()
        return self._value


def open_device(name: str) -> Device:
    """The device named auto, cpu, cuda or cuda:1. A device that is missing is an error, never a silent fallback."""
    if name == "auto":
        return _cuda() if torch.cuda.is_available() else Cpu()
    if name == "cpu":
        return Cpu()
    kind, _, index = name.partition(":")
    if kind != "cuda" or (index and not index.isdigit()):
        raise ConfigError(f"device={name!r} is unknown; use auto, cpu, cuda or cuda:N.")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(index or 0) >= count:
        raise ConfigError(f"device={name!r} is not available: torch finds {count} CUDA devices; use device='cpu'.")
    return _cuda(int(index or 0))


def _cuda(index: int = 0) -> Device:
    complete()  # kernels are compiled ahead on tensors without data
    return Cuda(index)


def spread(pages: Tensor) -> None:
    """Interleave untouched pages over the NUMA nodes of a machine that has several."""
    if native.status() is None and pages.device.type == "cpu":
        from bankfull.ops.native.memory import over_nodes

        over_nodes(pages)


def commits(pages: Tensor) -> Callable[[int], None] | None:
    """A call that commits memory up to a page before a step writes it; None where the system need not be told."""
    if native.status() is None and pages.device.type == "cpu":
        from bankfull.ops.native.memory import Commits

        return Commits(pages).up_to
    return None


FP8_UNITS = (9, 0)
"""CUDA's compute capability from which on our kernels multiply float8 activations."""


def multiplies_fp8() -> bool:
    """Whether the GPU here multiplies float8 activations; without one, what is planned is planned for one that does."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= FP8_UNITS
