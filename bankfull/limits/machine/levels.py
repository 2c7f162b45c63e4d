"""Read bandwidth of every level of the memory hierarchy: caches, memory, the bus to a device, the disk.

`ceilings` has the read ceilings of a step; this module measures the levels around them. Every thread reads its own
share repeatedly, so that a small working set comes from the caches nearest to its core.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from bankfull.limits.machine import cache_file, ceilings
from bankfull.limits.machine.ceilings import Ceilings
from bankfull.limits.machine.cpu_ceilings import LINE, filled, parse_size, shortest
from bankfull.limits.machine.disk import Disk, read_rate
from bankfull.ops.native import extension
from bankfull.paths import cache_dir

if TYPE_CHECKING:
    from bankfull.runtime.device import Device

FORMAT = 1
Advance = Callable[[int, str], None]
"""Progress callback: parts done, and the name of the next part."""
PARTS = 4
CACHES = Path("/sys/devices/system/cpu")
SMALLEST_SET, SMALLEST_FOR_TORCH = 16 << 10, 4 << 20
"""Smallest working sets with kernels and without. torch's start-up time dominates smaller reductions."""
LARGEST_CURVE = 512 << 20
ENOUGH_BYTES = 32 << 20
"""Bytes per timed call, enough to outlast the waking of the threads."""
SECONDS_PER_SIZE = 0.06
MEMORY, DEVICE_MEMORY = "memory", "device memory"


@dataclass(frozen=True, slots=True)
class Level:
    name: str
    capacity_bytes: int
    """Total size of the caches of this level that this process may use; 0 = unknown."""
    set_bytes: int
    """Working set that was read."""
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Levels:
    levels: tuple[Level, ...]
    """Fastest first; the last is the memory that holds the weights."""
    curve: tuple[tuple[int, float], ...]
    """(working set in bytes, bytes per second)."""
    disk: Disk | None
    """The disk of the cache folder; None if it is not writable or full."""
    to_device: float | None
    """Bytes per second from pinned host memory; None if the device shares the host's memory."""
    from_device: float | None
    when: str


def measure(device: Device, found: Ceilings, refresh: bool = False, advance: Advance | None = None) -> Levels:
    """The levels of a device with the ceilings `found`: from the cache file, or measured in a few seconds."""
    identity = {"levels": FORMAT, **ceilings.identity_of(device)}
    path = cache_file.path_of(identity, "levels")
    kept = None if refresh else _load(path, identity)
    if kept is None:
        kept = _measure(device, found, advance or (lambda done, note: None))
        cache_file.write(path, identity, levels=msgspec.to_builtins(kept))
    return kept


def caches() -> dict[int, int]:
    """Cache level -> total bytes over the cores that this process may use; empty if unknown."""
    try:
        allowed: Iterable[int] = sorted(os.sched_getaffinity(0))
    except AttributeError:
        return {}
    sizes: dict[tuple[int, str], int] = {}
    for cpu in allowed:
        for index in (CACHES / f"cpu{cpu}" / "cache").glob("index*"):
            try:
                kind, level = (index / "type").read_text().strip(), int((index / "level").read_text())
                if kind != "Instruction":
                    shared = (index / "shared_cpu_list").read_text().strip()
                    sizes[level, shared] = parse_size((index / "size").read_text())
            except (OSError, ValueError, KeyError, IndexError):
                continue
    totals: dict[int, int] = {}
    for (level, _), part in sorted(sizes.items()):
        totals[level] = totals.get(level, 0) + part
    return totals


def joined(found: Ceilings, levels: Levels) -> tuple[Ceilings, Levels]:
    """The best of both measurements, which were taken at different times, perhaps under load. Larger sets of the curve
    also bound the small set from below; only the memory level bounds memory."""
    memory = levels.levels[-1]
    read = found.read_bytes_per_s
    if memory.set_bytes >= ceilings.SAME_SET * found.read_set_bytes:
        read = max(read, memory.bytes_per_s)
    larger = [rate for size, rate in levels.curve if size >= found.cached_set_bytes]
    better = replace(
        found, read_bytes_per_s=read, cached_read_bytes_per_s=max([found.cached_read_bytes_per_s, read, *larger])
    )
    last = replace(memory, set_bytes=max(memory.set_bytes, found.read_set_bytes), bytes_per_s=read)
    return better, replace(levels, levels=(*levels.levels[:-1], last))


def _measure(device: Device, found: Ceilings, advance: Advance) -> Levels:
    advance(0, "caches and memory")
    to_device = from_device = None
    if device.kind == "cuda":
        from bankfull.limits.machine import cuda_ceilings

        curve = cuda_ceilings.read_curve(device.torch)
        levels = _device_levels(found)
        advance(2, "copies to and from the device")
        rates = cuda_ceilings.copy_rates(device.torch)
        to_device, from_device = rates if rates is not None else (None, None)
    else:
        levels, curve = _host_levels(found)
    advance(3, "disk")
    disk = read_rate(cache_dir())
    advance(PARTS, "")
    when = datetime.now(UTC).isoformat(timespec="seconds")
    return Levels(tuple(levels), tuple(curve), disk, to_device, from_device, when)


def _device_levels(found: Ceilings) -> list[Level]:
    memory = Level(DEVICE_MEMORY, 0, found.read_set_bytes, found.read_bytes_per_s)
    if not found.cache_bytes:
        return [memory]
    return [Level("L2", found.cache_bytes, found.cached_set_bytes, found.cached_read_bytes_per_s), memory]


def _host_levels(found: Ceilings) -> tuple[list[Level], list[tuple[int, float]]]:
    from bankfull.runtime.host import available_memory

    known = caches()
    wanted = max(LARGEST_CURVE, *(size // 2 for size in known.values()), 0)
    buffer = filled(min(wanted, max(available_memory() // 4, SMALLEST_FOR_TORCH)), 1.0)
    least = SMALLEST_SET if extension.kernels is not None else SMALLEST_FOR_TORCH
    levels = []
    for level, capacity in sorted(known.items()):
        size = capacity // 2 // LINE * LINE
        if least <= size <= buffer.nbytes:
            levels.append(Level(f"L{level}", capacity, size, _rate(buffer, size)))
    sizes = [SMALLEST_SET << doubling for doubling in range(buffer.nbytes.bit_length())]
    curve = [(size, _rate(buffer, size)) for size in sizes if least <= size <= buffer.nbytes]
    if found.read_set_bytes > buffer.nbytes:
        curve.append((found.read_set_bytes, found.read_bytes_per_s))
    memory = Level(MEMORY, 0, found.read_set_bytes, found.read_bytes_per_s)
    return [*(at_least(level, curve) for level in levels), memory], curve


def at_least(level: Level, curve: Iterable[tuple[int, float]]) -> Level:
    """A level is at least as fast as any larger working set; a slower value was disturbed by other load."""
    larger = [rate for size, rate in curve if size >= level.set_bytes]
    return replace(level, bytes_per_s=max([level.bytes_per_s, *larger]))


def _rate(buffer: Any, size: int) -> float:
    """Bytes per second over the first `size` bytes, with the fastest way to read them."""
    kernels, at = extension.kernels, buffer.data_ptr()
    rounds = max(1, ENOUGH_BYTES // size)
    ways: tuple[Callable[[], object], ...]
    if kernels is None:
        part = buffer[: size // buffer.element_size()]

        def several() -> None:
            for _ in range(rounds):
                part.sum()

        ways = (several,)
    else:
        ways = (lambda: kernels.read_again(at, size, rounds, False), lambda: kernels.read_again(at, size, rounds, True))
    return size * rounds / min(shortest(way, SECONDS_PER_SIZE / len(ways)) for way in ways)


def _load(path: Path, identity: dict[str, Any]) -> Levels | None:
    stored = cache_file.read(path, identity)
    try:
        kept = msgspec.convert(stored["levels"], Levels) if stored is not None else None
    except (KeyError, msgspec.ValidationError):
        return None
    if kept is None or not kept.levels:
        return None
    rates = [level.bytes_per_s for level in kept.levels] + [rate for _, rate in kept.curve]
    return kept if all(0 < rate < float("inf") for rate in rates) else None
