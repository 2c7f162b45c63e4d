"""Number of compute threads for this process, and the NUMA nodes of its CPUs.

One thread per CPU in the affinity mask, but no more than the cgroup CPU quota covers: a thread that is throttled in the
middle of a step delays all others. With SMT, a short measurement decides whether the second hardware thread of a core
is worth using.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from time import perf_counter
from types import ModuleType

SMT_GAIN = 1.1
"""Both hardware threads of a core are used if they reach this multiple of one thread's rate in reads or GEMM, ..."""
SMT_LOSS = 0.97
"""... and at least this fraction of it in the other."""
READ_BYTES = 64 << 20
MEASURE_SECONDS = 0.004
"""Minimum duration of one GEMM measurement."""
TURN_SECONDS = 0.004


@dataclass(frozen=True, slots=True)
class Machine:
    """Topology and cgroup limits as the kernel reports them; tests pass a directory tree of their own."""

    system: Path = Path("/sys")
    process: Path = Path("/proc/self")

    def quota(self) -> float | None:
        """CPUs granted by the tightest quota among the process's cgroup and its ancestors; None without a limit."""
        limits = [limit for folder in self._groups() if (limit := _limit(folder)) is not None]
        return min(limits, default=None)

    def cores(self, processors: Iterable[int]) -> int:
        """Number of physical cores of these CPUs; a core may have several CPUs."""
        cores = set()
        for number in processors:
            topology = self.system / "devices/system/cpu" / f"cpu{number}" / "topology"
            siblings = _read(topology / "core_cpus_list") or _read(topology / "thread_siblings_list")
            cores.add(siblings or str(number))
        return len(cores)

    def nodes(self, processors: Iterable[int]) -> tuple[int, ...]:
        """NUMA nodes of these CPUs."""
        allowed, numbers = set(processors), []
        for folder in sorted((self.system / "devices/system/node").glob("node[0-9]*")):
            if allowed & set(_numbers(_read(folder / "cpulist") or "")):
                numbers.append(int(folder.name.removeprefix("node")))
        return tuple(sorted(numbers))

    def _groups(self) -> Iterator[Path]:
        """Directories of the process's cgroups and their ancestors. In a cgroup namespace the reported path may not be
        mounted; the mount point is then the only one that exists."""
        mount = self.system / "fs/cgroup"
        for line in (_read(self.process / "cgroup") or "0::/").splitlines():
            _, controllers, path = [*line.split(":", 2), "", ""][:3]
            names = controllers.split(",")
            if controllers and "cpu" not in names:
                continue
            roots = [mount / controllers, mount / "cpu"] if controllers else [mount, mount / "unified"]
            group = PurePosixPath("/" + path.strip("/"))
            for root in roots:
                for step in (group, *group.parents):
                    yield root / str(step).lstrip("/")


@dataclass(frozen=True, slots=True)
class ThreadChoice:
    threads: int
    why: str


def processors() -> tuple[int, ...]:
    """CPUs in this process's affinity mask."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


@cache
def nodes() -> tuple[int, ...]:
    """NUMA nodes of the CPUs in this process's affinity mask; empty if the system does not report them."""
    return Machine().nodes(processors())


def choose_threads(kernels: ModuleType | None, machine: Machine | None = None) -> ThreadChoice:
    """The thread count for this process. Measures SMT if needed; the kernels' current thread count is restored."""
    machine = machine or Machine()
    cpus = processors()
    cores, quota = machine.cores(cpus), machine.quota()
    granted = len(cpus) if quota is None else max(1, int(quota + 1e-6))
    if granted < min(cores, len(cpus)):
        return ThreadChoice(granted, f"the cgroup's CPU quota grants {quota:g} of {len(cpus)} CPUs")
    if cores == len(cpus):
        return ThreadChoice(cores, f"the process may run on {len(cpus)} CPUs")
    both = min(granted, len(cpus))
    if kernels is None or both == cores:
        return ThreadChoice(cores, f"one per core of {len(cpus)} CPUs")
    gemm, reads = compare(kernels, cores, both)
    gains = f"one thread per CPU reached {gemm:.2f}x of the GEMM rate and {reads:.2f}x of the read rate"
    if max(gemm, reads) >= SMT_GAIN and min(gemm, reads) >= SMT_LOSS:
        return ThreadChoice(both, f"{cores} cores; {gains}")
    return ThreadChoice(cores, f"one per core of {len(cpus)} CPUs; {gains}")


def compare(kernels: ModuleType, few: int, many: int) -> tuple[float, float]:
    """Rates of `many` threads relative to `few`: multiply-adds in registers, and memory reads. Best of three
    alternating measurements each, some hundredths of a second in total."""
    import torch

    before = kernels.threads()
    buffer = torch.ones(READ_BYTES // 4)
    arithmetic = max(kernels.arithmetics().values())
    best = {few: [0.0, 0.0], many: [0.0, 0.0]}

    def multiply() -> float:
        return float(kernels.multiply(arithmetic, rounds))

    def read() -> float:
        return float(kernels.read_memory(buffer.data_ptr(), READ_BYTES, True))

    try:
        kernels.set_threads(few)
        rounds = 1024
        while _seconds(multiply) < MEASURE_SECONDS:
            rounds *= 2
        for _ in range(3):
            for count, rates in best.items():
                kernels.set_threads(count)
                operations = multiply()  # warm-up: threads start or wake up
                rates[0] = max(rates[0], operations / _seconds(multiply))
                rates[1] = max(rates[1], READ_BYTES / _seconds(read))
    finally:
        kernels.set_threads(before)
    return best[many][0] / best[few][0], best[many][1] / best[few][1]


def _seconds(work: Callable[[], object]) -> float:
    begun = perf_counter()
    work()
    return max(perf_counter() - begun, 1e-9)


def _limit(folder: Path) -> float | None:
    """CPU quota of one cgroup directory, v2 or v1."""
    try:
        if (both := _read(folder / "cpu.max")) is not None:
            most, period = both.split()[:2]
            return None if most == "max" else float(most) / float(period)
        quota, span = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota is not None and span is not None and float(quota) > 0:
            return float(quota) / float(span)
    except (ValueError, ZeroDivisionError):
        return None
    return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def _numbers(text: str) -> Iterator[int]:
    """CPUs of a list like 0-3,8."""
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
