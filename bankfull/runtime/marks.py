"""Moments of a device's work, whose distance in seconds can be measured."""

from __future__ import annotations

from typing import Protocol, Self

import torch


class TimeMark(Protocol):
    """A moment of a device's work."""

    def until(self, other: Self) -> float:
        """Seconds from here to another mark, once both have passed."""
        ...


class HostMark:
    """A moment of a device whose work runs on the host."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def until(self, other: HostMark) -> float:
        return other._seconds - self._seconds


class CudaMark:
    """An event on the current stream."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def until(self, other: CudaMark) -> float:
        return float(self._event.elapsed_time(other._event)) / 1e3
