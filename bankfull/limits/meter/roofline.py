"""The roofline of a step: what bounds each operation on given ceilings, and the shortest time of the whole step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from bankfull.limits.machine.ceilings import Ceilings
from bankfull.ops.cost import Cost, Rates
from bankfull.ops.meter import Ledger

Bound = Literal["memory", "arithmetic"]


def bound_of(cost: Cost, rates: Rates, bandwidth: float) -> Bound:
    """What takes longer: the arithmetic at these rates, or the memory traffic at `bandwidth` bytes/s."""
    return "arithmetic" if cost.arithmetic(rates) > cost.bytes / bandwidth else "memory"


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

    def as_rows(self) -> list[dict[str, Any]]:
        """JSON rows: one object per operation, then the total."""
        rows = [_row(e.operation, e.calls, e.cost, e.bound, e.seconds, e.share) for e in self.entries]
        calls = sum(e.calls for e in self.entries)
        return [*rows, _row("total", calls, self.total, self.bound, self.seconds, 1.0)]


def roofline(ledger: Ledger, ceilings: Ceilings, dtype: str) -> Roofline:
    """`dtype`: of the computation. The peak of each operation follows from its operands."""
    total = ledger.sum()
    # The bytes a step reads are its working set: a model that fits the cache is read from the cache at every step.
    bandwidth, rates = ceilings.read_at(total.read), ceilings.rates(dtype)

    times = {name: cost.seconds(rates, bandwidth) for name, cost in ledger.total.items()}
    whole = sum(times.values())
    entries = tuple(
        RooflineEntry(
            name,
            ledger.calls[name],
            cost,
            bound_of(cost, rates, bandwidth),
            times[name],
            times[name] / whole if whole else 0.0,
        )
        for name, cost in ledger.total.items()
    )
    return Roofline(entries, total, total.seconds(rates, bandwidth), bound_of(total, rates, bandwidth), bandwidth)


def least_seconds(costs: Iterable[Cost], ceilings: Ceilings, dtype: str) -> float:
    """The shortest time of consecutive steps; the bytes that a step reads are its working set."""
    rates = ceilings.rates(dtype)
    return sum(cost.seconds(rates, ceilings.read_at(cost.read)) for cost in costs)


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
