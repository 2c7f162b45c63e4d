"""Kernels that ran on the device during a few steps, and the idle time between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bankfull.errors import ConfigError
from benchmarks.gpu.engine import Session, Trace

SETTLED = 4
"""Decode steps before the first traced one."""
NAME_WIDTH = 72


@dataclass(frozen=True, slots=True)
class Ran:
    """One kernel or copy; begin and end in microseconds of the device's clock."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Kernel:
    name: str
    calls: float
    """Calls per step."""
    microseconds: float
    """Microseconds per step."""
    share: float
    """Share of the traced time. Kernels may overlap, so shares may sum to more than 1."""


@dataclass(frozen=True, slots=True)
class Timeline:
    steps: int
    microseconds: float
    """Microseconds per step, from the begin of the first kernel to the end of the last."""
    idle: float
    """Idle share of that time."""
    kernels: tuple[Kernel, ...]
    """Kernels, longest total time first."""

    def lines(self) -> list[str]:
        head = f"{'kernel':{NAME_WIDTH}} {'calls/step':>10} {'us/step':>10} {'share':>7}"
        rows = [
            f"{_short(k.name):{NAME_WIDTH}} {k.calls:10.4g} {k.microseconds:10.1f} {k.share:7.1%}" for k in self.kernels
        ]
        idle = f"{'(nothing runs)':{NAME_WIDTH}} {'':10} {self.idle * self.microseconds:10.1f} {self.idle:7.1%}"
        whole = f"{f'step, mean of {self.steps}':{NAME_WIDTH}} {'':10} {self.microseconds:10.1f} {1:7.1%}"
        return [head, *rows, idle, whole]


def timeline_of(ran: Sequence[Ran], steps: int) -> Timeline:
    if not ran:
        raise ConfigError("The profiler recorded no kernels on the device; check that it supports CUPTI.")
    ordered = sorted(ran, key=lambda one: one.begin)
    whole = max(one.end for one in ran) - ordered[0].begin
    covered, until = 0.0, ordered[0].begin
    for one in ordered:
        covered += max(0.0, one.end - max(one.begin, until))
        until = max(until, one.end)
    spent: dict[str, tuple[int, float]] = {}
    for one in ran:
        calls, seconds = spent.get(one.name, (0, 0.0))
        spent[one.name] = calls + 1, seconds + one.end - one.begin
    kernels = [Kernel(name, calls / steps, time / steps, time / whole) for name, (calls, time) in spent.items()]
    kernels.sort(key=lambda kernel: -kernel.microseconds)
    return Timeline(steps, whole / steps, 1.0 - covered / whole, tuple(kernels))


def trace_decode(
    session: Session, prompts: Sequence[Sequence[int]], outputs: int, steps: int, drafts: bool = False
) -> Timeline:
    """The timeline of `steps` decode steps in the middle of a run. `drafts`: they verify drafts."""
    if session.made.device.kind != "cuda":
        raise ConfigError("A time line is read from a CUDA device's own records; there is none here.")
    found: list[Ran] = []
    profiler: Any = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    begun: list[int] = []
    """Number of decode steps when tracing began; empty before."""

    def before(trace: Trace) -> None:
        seen = len(trace.shapes if drafts else trace.decode_shapes()) if trace.shapes else 0
        if not begun and seen >= SETTLED:
            torch.cuda.synchronize()
            profiler.start()
            begun.append(seen)
        elif begun and not found and seen >= begun[0] + steps:
            torch.cuda.synchronize()
            profiler.stop()
            found.extend(_records(profiler))

    session.run(prompts, outputs, before)
    return timeline_of(found, steps)


def trace_all(session: Session, prompts: Sequence[Sequence[int]], outputs: int) -> Timeline:
    """The timeline of all steps of a run, for prefill."""
    if session.made.device.kind != "cuda":
        raise ConfigError("A time line is read from a CUDA device's own records; there is none here.")
    profiler: Any = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    profiler.start()
    trace = session.run(prompts, outputs)
    torch.cuda.synchronize()
    profiler.stop()
    return timeline_of(_records(profiler), len(trace.shapes))


def _records(profiler: Any) -> list[Ran]:
    on_device = torch.autograd.DeviceType.CUDA
    return [
        Ran(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == on_device and event.time_range.end > event.time_range.start
    ]


def _short(name: str) -> str:
    return name if len(name) <= NAME_WIDTH else name[: NAME_WIDTH - 3] + "..."
