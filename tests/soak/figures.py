"""A result of the soak: a figure, its bounds, and whether they hold."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    name: str
    value: float
    unit: str = ""
    most: float | None = None
    least: float | None = None

    @property
    def holds(self) -> bool:
        return (self.most is None or self.value <= self.most) and (self.least is None or self.value >= self.least)

    @property
    def promise(self) -> str:
        bounds = [("at most", self.most), ("at least", self.least)]
        return ", ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"holds": self.holds}


def percentile(values: list[float], part: float) -> float:
    """The smallest value that at least this fraction of the values does not exceed; NaN without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else float("nan")


def table(figures: list[Figure]) -> str:
    rows = [
        (one.name, f"{one.value:.4g} {one.unit}".strip(), one.promise, "" if one.holds else "BROKEN") for one in figures
    ]
    widths = [max(len(row[column]) for row in [*rows, ("", "", "", "")]) for column in range(3)]
    return "\n".join(
        f"{name:<{widths[0]}}  {value:>{widths[1]}}  {promise:<{widths[2]}}  {state}".rstrip()
        for name, value, promise, state in rows
    )
