"""What a chart shows. How it looks is the business of `svg` and `text`."""

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
    """Where it begins and ends; None fits what is shown."""
    high: float | None = None
    unit: str = ""
    """Of the values as they are given: "s", "B", "FLOP/s", "%". Ticks get decimal prefixes, and seconds small ones."""
    names: Sequence[str] = ()
    """For bars: what stands at 0, 1, 2, ... instead of numbers."""

    def __post_init__(self) -> None:
        ends = [end for end in (self.low, self.high) if end is not None]
        if not all(math.isfinite(end) for end in ends) or (len(ends) == 2 and ends[0] >= ends[1]):
            raise ValueError(f"The axis {self.label!r} cannot reach from {self.low} to {self.high}.")
        if self.log and any(end <= 0 for end in ends):
            raise ValueError(f"The axis {self.label!r} is logarithmic: its ends must be above 0.")


@dataclass(frozen=True, slots=True)
class Series:
    """Points that belong together. What an axis cannot show (infinite, or not above 0 on a log scale) is left out, and
    breaks a line in two. Between two points a line is straight on the paper, whatever the scales are."""

    name: str
    points: Sequence[Point]
    kind: Kind = "line"
    """An area reaches down to the baseline; bars of several series stand side by side."""
    dashed: bool = False

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"A series is drawn as {', '.join(get_args(Kind))}, not as {self.kind!r}.")


@dataclass(frozen=True, slots=True)
class Mark:
    """A place of its own, with a word beside it."""

    x: float
    y: float
    label: str


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    marks: Sequence[Mark] = ()
    description: str = ""
    """For who cannot see it; an empty one is made up from the series."""

    def svg(self, width: int = 760, height: int = 460, theme: Literal["auto", "light", "dark"] = "auto") -> str:
        """One <svg> element. `auto` follows the reader's system by CSS variables; the others have fixed colours.

        `height` is without the legend, which takes as many lines as it needs.
        """
        from bankfull.limits.charts.svg import draw

        return draw(self, width, height, theme)

    def text(self, width: int = 80, height: int = 20, *, color: bool = False, plain: bool = False) -> str:
        """Lines of at most `width` columns, `height` of which are the plot itself.

        `plain` uses nothing but ASCII to draw.
        """
        from bankfull.limits.charts.text import draw

        return draw(self, width, height, color=color, plain=plain)
