"""How many threads this process should use, and which memory nodes its processors have.

A thread for each processor that the process may run on, but no more than its control group's quota pays for: threads
that are stopped in the middle of a step hold up all others. Where two processors are threads of one core, a short
measurement decides whether the second one is worth a thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from time import perf_counter
from types import ModuleType

WORTH = 1.1
"""Both threads of a core are used where they do so much more than one, in reading or in products, ..."""
NO_LOSS = 0.97
"""... and lose no more than this in the other."""
READ_BYTES = 64 << 20
TURN_SECONDS = 0.004


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the system tells what there is; tests bring a tree of their own."""

    system: Path = Path("/sys")
    process: Path = Path("/proc/self")

    def quota(self) -> float | None:
        """Processors that control groups pay for, the nearest and all around it; None: no limit."""
        found = [limit for folder in self._groups() if (limit := _limit(folder)) is not None]
        return min(found, default=None)

    def cores(self, processors: Iterable[int]) -> int:
        """Cores behind these processors; a core may have several."""
        found = set()
        for number in processors:
            topology = self.system / "devices/system/cpu" / f"cpu{number}" / "topology"
            siblings = _read(topology / "core_cpus_list") or _read(topology / "thread_siblings_list")
            found.add(siblings or str(number))
        return len(found)

    def nodes(self, processors: Iterable[int]) -> tuple[int, ...]:
        """Memory nodes that these processors belong to."""
        allowed, found = set(processors), []
        for folder in sorted((self.system / "devices/system/node").glob("node[0-9]*")):
            if allowed & set(_numbers(_read(folder / "cpulist") or "")):
                found.append(int(folder.name.removeprefix("node")))
        return tuple(sorted(found))

    def _groups(self) -> Iterator[Path]:
        """Folders of the process's control groups and of all around them. In a namespace of its own a process may be
        told a path that is not mounted: then the mount itself is all there is."""
        mount = self.system / "fs/cgroup"
        for line in (_read(self.process / "cgroup") or "0::/").splitlines():
            _, controllers, path = [*line.split(":", 2), "", ""][:3]
            names = controllers.split(",")
            if controllers and "cpu" not in names:
                continue
            roots = [mount / controllers, mount / "cpu"] if controllers else [mount, mount / "unified"]
            own = PurePosixPath("/" + path.strip("/"))
            for root in roots:
                for step in (own, *own.parents):
                    yield root / str(step).lstrip("/")


@dataclass(frozen=True, slots=True)
class Choice:
    threads: int
    why: str


def processors() -> tuple[int, ...]:
    """Those that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


@cache
def nodes() -> tuple[int, ...]:
    """The memory nodes of the processors that this process may run on; none where the system tells nothing."""
    return Machine().nodes(processors())


def suitable(kernels: ModuleType | None, machine: Machine | None = None) -> Choice:
    """What suits this process. Measures where that has to decide; the kernels' number of threads stays as it was."""
    machine = machine or Machine()
    own = processors()
    cores, quota = machine.cores(own), machine.quota()
    paid = len(own) if quota is None else max(1, int(quota + 1e-6))
    if paid < min(cores, len(own)):
        return Choice(paid, f"the control group's quota pays for {quota:g} of {len(own)} processors")
    if cores == len(own):
        return Choice(cores, f"the process may run on {len(own)} processors")
    both = min(paid, len(own))
    if kernels is None or both == cores:
        return Choice(cores, f"one for each core of {len(own)} processors")
    products, reads = compare(kernels, cores, both)
    gains = f"a thread for every processor gave {products:.2f}x of the products and {reads:.2f}x of the reads"
    if max(products, reads) >= WORTH and min(products, reads) >= NO_LOSS:
        return Choice(both, f"{cores} cores; {gains}")
    return Choice(cores, f"one for each core of {len(own)} processors; {gains}")


def compare(kernels: ModuleType, few: int, many: int) -> tuple[float, float]:
    """What `many` threads do of what `few` do: products in registers, and reads from memory. Best of three turns each,
    in alternation, some hundredths of a second in all."""
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
        while _seconds(multiply) < TURN_SECONDS:
            rounds *= 2
        for _ in range(3):
            for count, rates in best.items():
                kernels.set_threads(count)
                operations = multiply()  # threads start, or wake up
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
    """Of one control group, in either generation of the interface."""
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
    """Of a list such as 0-3,8."""
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
