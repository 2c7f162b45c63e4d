"""Label placement: find a place that covers nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

OUTSIDE = 1000.0
"""Penalty for leaving the plot, relative to covering something in it."""


class Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def shared(self, other: Box) -> float:
        """The area of the overlap."""
        across = min(self.right, other.right) - max(self.left, other.left)
        down = min(self.bottom, other.bottom) - max(self.top, other.top)
        return across * down if across > 0 and down > 0 else 0.0

    @property
    def area(self) -> float:
        return (self.right - self.left) * (self.bottom - self.top)


def best(candidates: Iterable[Box], taken: Sequence[Box], within: Box) -> tuple[Box, float]:
    """The first place that covers nothing, else the one that covers least; and the covered area."""
    least: tuple[Box, float] | None = None
    for box in candidates:
        covered = sum(box.shared(other) for other in taken) + OUTSIDE * (box.area - box.shared(within))
        if least is None or covered < least[1] - 1e-9:
            least = box, covered
        if covered <= 1e-9:
            break
    assert least is not None, "no candidates"
    return least


def around(x: float, y: float, width: float, height: float, gap: float, row: float, rows: int = 6) -> Iterator[Box]:
    """Places for a label of this size: next to its point first, then increasingly far above and below."""
    middle = y - height / 2
    for step in range(rows + 1):
        for sign in (-1, 1) if step else (0,):
            top = middle + sign * step * row
            yield Box(x + gap, top, x + gap + width, top + height)
            yield Box(x - gap - width, top, x - gap, top + height)
            if step:
                yield Box(x - width / 2, top, x + width / 2, top + height)
