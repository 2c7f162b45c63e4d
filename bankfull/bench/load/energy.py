"""The energy that this machine uses: RAPL counters for processors and memory, NVML counters for GPUs.

Boards, fans and power supplies have no counters, so the true figures are higher.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import monotonic
from typing import Any

log = logging.getLogger("bankfull")

POWERCAP = Path("/sys/class/powercap")
NVIDIA_DRIVER = Path("/proc/driver/nvidia")
SAMPLE_SECONDS = 10.0
"""Seconds between two readings. Counters wrap around after some hundred kilojoules and must be read before that."""


@dataclass(frozen=True, slots=True)
class Counter:
    """`read` returns the joules used since an arbitrary moment. The count starts again at 0 when it reaches `wrap`."""

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
    """Joules by the name of the counter."""
    seconds: float

    @property
    def total(self) -> float:
        return sum(self.joules.values())

    @property
    def watts(self) -> float:
        return self.total / self.seconds if self.seconds else 0.0

    def per_token(self, tokens: int) -> float | None:
        return self.total / tokens if tokens else None


def counters(powercap: Path = POWERCAP, nvidia_driver: Path = NVIDIA_DRIVER) -> list[Counter]:
    """The counters that can be read now."""
    return [*_rapl(powercap), *_nvml(nvidia_driver)]


class EnergyMeter:
    """Adds up the counters while it is entered; `energy` is None where there are none."""

    def __init__(self, found: Sequence[Counter] | None = None, every: float = SAMPLE_SECONDS) -> None:
        self._counters = list(counters() if found is None else found)
        self._every = every
        self._joules = dict.fromkeys((counter.name for counter in self._counters), 0.0)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._seconds = 0.0

    def __enter__(self) -> EnergyMeter:
        self._begun = monotonic()
        self._last = {counter.name: counter.read() for counter in self._counters}
        if self._counters:
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *problem: object) -> None:
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
    """Processor packages and their memory. "psys" covers the whole platform and would count these twice."""
    packages = []
    for zone in sorted(folder.glob("intel-rapl:*")) if folder.is_dir() else []:
        with suppress(OSError, ValueError):
            name = (zone / "name").read_text().strip()
            if not name.startswith(("package", "dram")):
                continue
            (zone / "energy_uj").read_text()  # readable for the administrator only since 2020
            wrap = int((zone / "max_energy_range_uj").read_text()) / 1e6
            packages.append(Counter(f"{zone.name} {name}", _microjoules(zone / "energy_uj"), wrap))
    return packages


def _microjoules(file: Path) -> Callable[[], float]:
    return lambda: int(file.read_text()) / 1e6


def _nvml(driver: Path) -> list[Counter]:
    """The counter of each GPU that has one: Volta and later."""
    try:
        import pynvml
    except ImportError:
        if driver.exists():
            report_missing_library()
        return []
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:  # no driver, or none that works
        return []
    gpus = []
    for number, handle in enumerate(handles):
        with suppress(OSError):
            read = _nvml_joules(pynvml, handle)
            read()
            gpus.append(Counter(f"gpu {number}", read))
    return gpus


@cache
def report_missing_library() -> None:
    """One line for a process, however many runs it measures."""
    log.warning("GPU energy is not measured: `pip install 'bankfull[energy]'` adds the library that reads it.")


def _nvml_joules(nvml: Any, handle: Any) -> Callable[[], float]:
    def read() -> float:
        try:
            return nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3
        except nvml.NVMLError as error:
            raise OSError(f"the GPU's energy counter cannot be read: {error}") from None

    return read
