"""What this machine tells about its energy: RAPL for processors and memory, NVML for GPUs.

Only what can be read is counted: boards, fans and power supplies tell nothing, so true figures are higher.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
SAMPLE_SECONDS = 10.0
"""Counters wrap around after some hundred kilojoules; they must be read more often than that."""


@dataclass(frozen=True, slots=True)
class Counter:
    """Joules since some moment; where it wraps around, at `wrap`."""

    name: str
    read: Callable[[], float]
    wrap: float | None = None

    def between(self, earlier: float, later: float) -> float:
        if later >= earlier:
            return later - earlier
        return later + (self.wrap - earlier) if self.wrap is not None else 0.0


@dataclass(frozen=True, slots=True)
class Energy:
    joules: dict[str, float]
    """By the names of the counters."""
    seconds: float

    @property
    def total(self) -> float:
        return sum(self.joules.values())

    @property
    def watts(self) -> float:
        return self.total / self.seconds if self.seconds else 0.0

    def per_token(self, tokens: int) -> float | None:
        return self.total / tokens if tokens else None


def counters(powercap: Path = POWERCAP) -> list[Counter]:
    """Those that can be read now."""
    return [*_rapl(powercap), *_nvml()]


class EnergyMeter:
    """Sums up counters while it is entered; `energy` is None where there are none."""

    def __init__(self, found: Sequence[Counter] | None = None, every: float = SAMPLE_SECONDS) -> None:
        self._counters = list(counters() if found is None else found)
        self._every = every
        self._joules = dict.fromkeys((counter.name for counter in self._counters), 0.0)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._seconds = 0.0

    def __enter__(self) -> EnergyMeter:
        from time import monotonic

        self._begun = monotonic()
        self._last = {counter.name: counter.read() for counter in self._counters}
        if self._counters:
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *problem: object) -> None:
        from time import monotonic

        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._sample()
        self._seconds = monotonic() - self._begun

    @property
    def energy(self) -> Energy | None:
        return Energy(dict(self._joules), self._seconds) if self._counters else None

    def _watch(self) -> None:
        while not self._stop.wait(self._every):
            self._sample()

    def _sample(self) -> None:
        for counter in self._counters:
            with suppress(OSError, ValueError):
                now = counter.read()
                self._joules[counter.name] += counter.between(self._last[counter.name], now)
                self._last[counter.name] = now


def _rapl(folder: Path) -> list[Counter]:
    """Packages, and the memory beside each. "psys" is the whole platform, which holds these again."""
    found = []
    for zone in sorted(folder.glob("intel-rapl:*")) if folder.is_dir() else []:
        with suppress(OSError, ValueError):
            name = (zone / "name").read_text().strip()
            if not name.startswith(("package", "dram")):
                continue
            (zone / "energy_uj").read_text()  # since 2020 this is for the administrator only
            wrap = int((zone / "max_energy_range_uj").read_text()) / 1e6
            found.append(Counter(f"{zone.name} {name}", _microjoules(zone / "energy_uj"), wrap))
    return found


def _microjoules(file: Path) -> Callable[[], float]:
    return lambda: int(file.read_text()) / 1e6


def _nvml() -> list[Counter]:
    """Each GPU's own counter, in millijoules since the driver was loaded; Volta and later have it."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    if library.nvmlInit_v2() != 0:
        return []
    count = ctypes.c_uint()
    if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return []
    found = []
    for number in range(count.value):
        handle, value = ctypes.c_void_p(), ctypes.c_ulonglong()
        if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(number), ctypes.byref(handle)) != 0:
            continue
        if library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(value)) == 0:
            found.append(Counter(f"gpu {number}", _millijoules(library, handle)))
    return found


def _millijoules(library: ctypes.CDLL, handle: ctypes.c_void_p) -> Callable[[], float]:
    def read() -> float:
        value = ctypes.c_ulonglong()
        if library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(value)) != 0:
            raise OSError("the GPU does not tell its energy any more")
        return value.value / 1e3

    return read
