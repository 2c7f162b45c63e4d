"""The roofline of a step: what bounds each operation on given ceilings, and the shortest time of the whole step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from bankfull.limits.machine.ceilings import Ceilings
from bankfull.ops.cost import Cost
from bankfull.ops.meter import Ledger
from bankfull.ops.registry import FLOAT

Bound = Literal["memory", "arithmetic"]


def bound_of(cost: Cost, peak: float, bandwidth: float) -> Bound:
    """What takes longer: the arithmetic at `peak` FLOP/s, or the memory traffic at `bandwidth` bytes/s."""
    return "arithmetic" if cost.flops / peak > cost.bytes / bandwidth else "memory"


@dataclass(frozen=True, slots=True)
class RooflineEntry:
    """All calls of one operation."""

    operation: str
    calls: int
    cost: Cost
    bound: Bound
    seconds: float
    """Shortest time on the ceilings."""
    share: float
    """Share of the sum over all operations."""


@dataclass(frozen=True, slots=True)
class Roofline:
    entries: tuple[RooflineEntry, ...]
    total: Cost
    seconds: float
    """The shortest time of the step: the longer of its memory time and its arithmetic time, fully overlapped. At most
    the sum of the entries' times, which holds if operations cannot overlap."""
    bound: Bound
    bytes_per_second: float
    flops_per_second: float

    def as_rows(self) -> list[dict[str, Any]]:
        """JSON rows: one object per operation, then the total."""
        rows = [_row(e.operation, e.calls, e.cost, e.bound, e.seconds, e.share) for e in self.entries]
        calls = sum(e.calls for e in self.entries)
        return [*rows, _row("total", calls, self.total, self.bound, self.seconds, 1.0)]


def roofline(ledger: Ledger, ceilings: Ceilings, dtype: str, activations: str = FLOAT) -> Roofline:
    """`dtype` and `activations` select the arithmetic peak."""
    total = ledger.sum()
    # The bytes a step reads are its working set: a model that fits the cache is read from the cache at every step.
    bandwidth, peak = ceilings.read_at(total.read), ceilings.peak_of(dtype, activations)

    times = {name: cost.seconds(peak, bandwidth) for name, cost in ledger.total.items()}
    whole = sum(times.values())
    entries = tuple(
        RooflineEntry(
            name,
            ledger.calls[name],
            cost,
            bound_of(cost, peak, bandwidth),
            times[name],
            times[name] / whole if whole else 0.0,
        )
        for name, cost in ledger.total.items()
    )
    return Roofline(entries, total, total.seconds(peak, bandwidth), bound_of(total, peak, bandwidth), bandwidth, peak)


def least_seconds(costs: Iterable[Cost], ceilings: Ceilings, dtype: str, activations: str = FLOAT) -> float:
    """The shortest time of consecutive steps; the bytes that a step reads are its working set."""
    peak = ceilings.peak_of(dtype, activations)
    return sum(cost.seconds(peak, ceilings.read_at(cost.read)) for cost in costs)


def _row(name: str, calls: int, cost: Cost, bound: Bound, seconds: float, share: float) -> dict[str, Any]:
    return {
        "operation": name,
        "calls": calls,
        "flops": cost.flops,
        "read_bytes": cost.read,
        "write_bytes": cost.write,
        "intensity": cost.intensity if cost.bytes else None,
        "bound": bound,
        "seconds": seconds,
        "share": share,
    }
