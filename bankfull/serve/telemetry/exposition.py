"""Counters, gauges and histograms in the text format of Prometheus, as far as this server needs it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = tuple[str, ...]


class ScalarMetric:
    """A counter or a gauge with one number per combination of label values."""

    __slots__ = ("help", "kind", "labels", "name", "values")

    def __init__(self, kind: str, name: str, help: str, labels: Sequence[str] = ()) -> None:
        self.kind, self.name, self.help, self.labels = kind, name, help, tuple(labels)
        self.values: dict[Labels, float] = {} if labels else {(): 0.0}

    def add(self, amount: float = 1.0, *labels: str) -> None:
        self.values[labels] = self.values.get(labels, 0.0) + amount

    def set(self, value: float, *labels: str) -> None:
        self.values[labels] = value

    def samples(self) -> Iterable[tuple[str, Sequence[str], Labels, float]]:
        """Name suffix, extra label names, all label values, number."""
        return [("", (), labels, value) for labels, value in self.values.items()]


class Histogram:
    """A histogram: the number of observations up to each bound."""

    __slots__ = ("bounds", "counts", "help", "kind", "labels", "name", "sum")

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        self.kind, self.name, self.help, self.labels = "histogram", name, help, ()
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def samples(self) -> Iterable[tuple[str, Sequence[str], Labels, float]]:
        lines: list[tuple[str, Sequence[str], Labels, float]] = []
        total = 0
        for bound, count in zip((*self.bounds, math.inf), self.counts, strict=True):
            total += count
            lines.append(("_bucket", ("le",), (_number(bound),), total))
        return [*lines, ("_sum", (), (), self.sum), ("_count", (), (), total)]


Family = ScalarMetric | Histogram


def write_families(families: Iterable[Family], prefix: str, fixed: dict[str, str]) -> str:
    """The families as text; every sample gets the `fixed` labels."""
    lines = []
    shared = [f'{name}="{_escaped(value)}"' for name, value in fixed.items()]
    for family in families:
        name = prefix + family.name
        lines += [f"# HELP {name} {family.help}", f"# TYPE {name} {family.kind}"]
        for suffix, more, values, number in family.samples():
            pairs = zip((*family.labels, *more), values, strict=True)
            labels = ",".join([*shared, *(f'{label}="{_escaped(value)}"' for label, value in pairs)])
            lines.append(f"{name}{suffix}{f'{{{labels}}}' if labels else ''} {_number(number)}")
    return "".join(f"{line}\n" for line in lines)


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
