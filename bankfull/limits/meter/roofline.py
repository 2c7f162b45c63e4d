"""What bounds each operation of a step on given ceilings, and the shortest time that the step can take there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from bankfull.limits.machine.ceilings import Ceilings
from bankfull.limits.meter.step import StepShape
from bankfull.ops.cost import Cost
from bankfull.ops.meter import Ledger
from bankfull.ops.registry import FLOAT
from bankfull.weights.source import ModelFiles

Bound = Literal["memory", "arithmetic"]


def model_cost(
    model: ModelFiles | Mapping[str, Any],
    step: StepShape,
    *,
    dtype: str | None = None,
    scheme: str | None = None,
    expand: bool = False,
) -> Ledger:
    """The cost of one step of a model, from its files or its configuration alone; no weight is read.

    `scheme` stores the matrices when there is only a configuration. Many steps of one model: keep a `MeteredModel`.
    """
    from bankfull.limits.meter.metered import MeteredModel

    return MeteredModel(model, dtype=dtype, scheme=scheme, expand=expand).cost(step)


@dataclass(frozen=True, slots=True)
class Entry:
    """One kind of operation, all its calls together."""

    operation: str
    calls: int
    cost: Cost
    bound: Bound
    seconds: float
    """The shortest time on the ceilings."""
    share: float
    """Of the sum of these times."""


@dataclass(frozen=True, slots=True)
class Roofline:
    entries: tuple[Entry, ...]
    total: Cost
    seconds: float
    """The step's own limit: whichever of all its bytes and all its arithmetic takes longer, each overlapped with the
    other. Never more than the sum of the entries' times, which would hold if operations could not overlap."""
    bound: Bound
    bytes_per_second: float
    flops_per_second: float

    def as_rows(self) -> list[dict[str, Any]]:
        """For JSON: one object per operation, then the total."""
        rows = [_row(e.operation, e.calls, e.cost, e.bound, e.seconds, e.share) for e in self.entries]
        calls = sum(e.calls for e in self.entries)
        return [*rows, _row("total", calls, self.total, self.bound, self.seconds, 1.0)]


def roofline(ledger: Ledger, ceilings: Ceilings, dtype: str, activations: str = FLOAT) -> Roofline:
    """`dtype` and `activations` are the arithmetic's: they choose the matmul peak."""
    total = ledger.sum()
    # What a step reads is its working set: a model that fits the cache is read from there, step after step.
    bandwidth, peak = ceilings.read_at(total.read), ceilings.peak_of(dtype, activations)

    def bound_of(cost: Cost) -> Bound:
        return "arithmetic" if cost.flops / peak > cost.bytes / bandwidth else "memory"

    times = {name: cost.seconds(peak, bandwidth) for name, cost in ledger.total.items()}
    whole = sum(times.values())
    entries = tuple(
        Entry(name, ledger.calls[name], cost, bound_of(cost), times[name], times[name] / whole if whole else 0.0)
        for name, cost in ledger.total.items()
    )
    return Roofline(entries, total, total.seconds(peak, bandwidth), bound_of(total), bandwidth, peak)


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
