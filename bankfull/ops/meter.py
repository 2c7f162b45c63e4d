"""The fourth provider: on meta tensors with real integers, operations record their cost instead of computing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bankfull.ops.cost import Cost
from bankfull.ops.registry import Function, Kit, Operation


@dataclass(slots=True)
class Ledger:
    """Costs by operation, in the order in which the operations first ran."""

    total: dict[str, Cost] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)

    def record(self, name: str, cost: Cost, calls: int = 1) -> None:
        self.total[name] = self.total.get(name, Cost()) + cost
        self.calls[name] = self.calls.get(name, 0) + calls

    def merge(self, other: Ledger, part: str = "") -> None:
        """Add another ledger's entries, named "part/name" if `part` is given."""
        for name, cost in list(other.total.items()):
            self.record(f"{part}/{name}" if part else name, cost, other.calls[name])

    def sum(self) -> Cost:
        return sum(self.total.values(), Cost())


class Meter(Kit):
    """A kit whose bound operations all record into one ledger."""

    def __init__(self) -> None:
        super().__init__("meta", ())
        self.ledger = Ledger()

    def bind(self, operation: Operation, **facts: Any) -> Function:
        label = operation.bound_with(facts).label

        def run(*args: Any, **kwargs: Any) -> Any:
            self.ledger.record(label, operation.cost(*args, **kwargs))
            return operation.on_meta(*args, **kwargs)

        return run

    def take(self) -> Ledger:
        """Return the current ledger and start a new one."""
        done, self.ledger = self.ledger, Ledger()
        return done
