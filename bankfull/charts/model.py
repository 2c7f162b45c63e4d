"""The content of a chart. `svg` and `text` draw it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Point = tuple[float, float]
Kind = Literal["line", "points", "area", "bars"]


@dataclass(frozen=True, slots=True)
class Axis:
    label: str
    log: bool = False
    low: float | None = None
    """Ends of the axis; None: fitted to the data."""
    high: float | None = None
    unit: str = ""
    """Unit of the values: "s", "B", "FLOP/s", "%". Tick labels get decimal prefixes; seconds only small ones."""
    names: Sequence[str] = ()
    """Labels of bars at 0, 1, 2, ... instead of numbers."""

    def __post_init__(self) -> None:
        ends = [end for end in (self.low, self.high) if end is not None]
        if not all(math.isfinite(end) for end in ends) or (len(ends) == 2 and ends[0] >= ends[1]):
            raise ValueError(
                f"The axis {self.label!r} cannot go from {self.low} to {self.high}; give a low end below the high end."
            )
        if self.log and any(end <= 0 for end in ends):
            raise ValueError(f"The axis {self.label!r} is logarithmic: its ends must be above 0.")


@dataclass(frozen=True, slots=True)
class Series:
    """The points of one line, set of bars, or area. Values that an axis cannot show (infinite, or not above 0 on a log
    scale) are omitted and split a line. Lines between two points are straight on the page, whatever the scales."""

    name: str
    points: Sequence[Point]
    kind: Kind = "line"
    """An area extends down to the baseline; bars of several series are side by side."""
    dashed: bool = False

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"A series is drawn as {', '.join(get_args(Kind))}, not as {self.kind!r}.")


@dataclass(frozen=True, slots=True)
class Mark:
    """A single point with a label."""

    x: float
    y: float
    label: str
    series: int | None = None
    """Number of the series that its point belongs to, and is drawn like; None: of none."""


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    marks: Sequence[Mark] = ()
    description: str = ""
    """Alternative text; generated from the series if empty."""

    def svg(self, width: int = 760, height: int = 460, theme: Literal["auto", "light", "dark"] = "auto") -> str:
        """One <svg> element. `auto` follows the reader's system with CSS variables; other themes have fixed colours.

        `height` excludes the legend, which takes as many lines as it needs.
        """
        from bankfull.charts.svg import draw

        return draw(self, width, height, theme)

    def text(self, width: int = 80, height: int = 20, *, color: bool = False, plain: bool = False) -> str:
        """Lines of at most `width` columns; the plot itself has `height` lines. `plain`: ASCII only."""
        from bankfull.charts.text import draw

        return draw(self, width, height, color=color, plain=plain)
