"""Time by which the age of content is measured, across processes.

The clock of the day may jump: it is set by hand, or wrong until the network has answered. So the time of a folder goes
on by what the machine has counted since it was booted, and only across a reboot by the clock of the day, and never
backwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def since_boot() -> float:
    """Seconds since the machine was booted, with those that it has slept."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def boot_name() -> str:
    """Different after each boot; empty where the system does not tell."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


@dataclass(slots=True)
class ServiceClock:
    """`kept`: what an earlier process has stored, or nothing; then it begins at the clock of the day."""

    kept: dict[str, Any]
    counted: Callable[[], float] = since_boot
    day: Callable[[], float] = time.time
    boot: str = field(default_factory=boot_name)
    _base: float = field(init=False)
    _began: float = field(init=False)

    def __post_init__(self) -> None:
        self._began = self.counted()
        values = [self.kept.get(name) for name in ("at", "counted", "day")]
        if not all(isinstance(value, int | float) for value in values):
            self._base = self.day()
            return
        at, counted, day = map(float, values)  # type: ignore[arg-type]
        same = bool(self.boot) and self.kept.get("boot") == self.boot
        self._base = at + max(0.0, self._began - counted if same else self.day() - day)

    def now(self) -> float:
        return self._base + self.counted() - self._began

    def stored(self) -> dict[str, Any]:
        """What the next process needs."""
        return {"at": self.now(), "counted": self.counted(), "day": self.day(), "boot": self.boot}
