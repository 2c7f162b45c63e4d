"""Scales: the position of a value on an axis, and its ticks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from bankfull.charts.model import Axis, Chart, Point, Series

SHORT_UNITS = ("s", "B", "%", "W", "J", "$")
"""Units short enough for every tick label; other units are in the axis label."""
LARGE_PREFIXES = ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k"))
SMALL_PREFIXES = ((0, ""), (-3, "m"), (-6, "u"), (-9, "n"))
"""Decimal prefixes of seconds."""
FAR_FROM_ZERO = 0.8
"""An axis starts at 0 unless all values lie in this upper part of it, where they would be hard to distinguish."""
ROOM = 1.1
"""Margin between the data and the ends of a log scale, as a factor."""


@dataclass(frozen=True, slots=True)
class Scale:
    axis: Axis
    low: float
    high: float

    def at(self, value: float) -> float | None:
        """Position of a value: 0 at the low end of the axis, 1 at the high end; None if the axis cannot show it."""
        if not math.isfinite(value) or (self.axis.log and value <= 0):
            return None
        if self.axis.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """At most about `most` round values, with their positions."""
        if self.axis.names:
            values: Iterable[float] = range(len(self.axis.names))
        else:
            values = _log_ticks(self.low, self.high, most) if self.axis.log else _even_ticks(self.low, self.high, most)
        placed = ((self.at(value), value) for value in values)
        return [(at, self.shown(value)) for at, value in placed if at is not None and -1e-9 <= at <= 1 + 1e-9]

    def shown(self, value: float) -> str:
        """A value with its unit, formatted for reading."""
        names = self.axis.names
        if names:
            return names[int(value)] if 0 <= value < len(names) and value == int(value) else ""
        return spelled(value, self.axis.unit if self.axis.unit in SHORT_UNITS else "")

    @property
    def title(self) -> str:
        unit = self.axis.unit
        return f"{self.axis.label} ({unit})" if unit and unit not in SHORT_UNITS else self.axis.label


def spelled(value: float, unit: str = "") -> str:
    """1500000 -> 1.5M, 0.02 s -> 20 ms, 80 % -> 80%."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}{'' if not unit else '%' if unit == '%' else ' ' + unit}"
    if unit == "%":
        return f"{value:.4g}%"
    for power, prefix in SMALL_PREFIXES if unit == "s" else LARGE_PREFIXES:
        if abs(value) >= 0.9995 * 10.0**power:
            number = f"{value / 10.0**power:.3g}" if abs(value) < 999.5 * 10.0**power else f"{value / 10.0**power:.0f}"
            return f"{number} {prefix}{unit}" if unit else f"{number}{prefix}"
    return f"{value:.3g} {unit}".rstrip()


def scales_of(chart: Chart) -> tuple[Scale, Scale]:
    places = [point for series in chart.series for point in series.points] + [(mark.x, mark.y) for mark in chart.marks]
    filled = any(series.kind in ("bars", "area") for series in chart.series)
    bars = any(series.kind == "bars" for series in chart.series)
    margin = 1.25 * half_bar(chart.series) if bars else 0.0
    across = _scale(chart.x, [x for x, _ in places], margin=margin)
    return across, _scale(chart.y, [y for _, y in places], upright=True, filled=filled)


def half_bar(series: Iterable[Series]) -> float:
    """Half the width of the bars at one position, in units of the axis."""
    places = sorted({x for one in series if one.kind == "bars" for x, _ in one.points if math.isfinite(x)})
    gaps = [after - before for before, after in pairwise(places)]
    return 0.4 * min(gaps, default=1.0)


def visible_runs(points: Iterable[Point], x: Scale, y: Scale) -> Iterator[list[tuple[Point, Point]]]:
    """Runs of consecutive points that the axes can show, as fractions of the axes."""
    run: list[tuple[Point, Point]] = []
    for point in points:
        across, up = x.at(point[0]), y.at(point[1])
        if across is None or up is None:
            if run:
                yield run
            run = []
        else:
            run.append((point, (across, up)))
    if run:
        yield run


def clipped(start: Point, end: Point, low: Point = (0.0, 0.0), high: Point = (1.0, 1.0)) -> tuple[Point, Point] | None:
    """The part of a line segment inside a rectangle (Liang-Barsky)."""
    steps = end[0] - start[0], end[1] - start[1]
    first, last = 0.0, 1.0
    for side in (0, 1):
        for towards, room in ((-steps[side], start[side] - low[side]), (steps[side], high[side] - start[side])):
            if towards == 0:
                if room < 0:
                    return None
            elif towards < 0:
                first = max(first, room / towards)
            else:
                last = min(last, room / towards)
    if first > last:
        return None
    begin = start[0] + first * steps[0], start[1] + first * steps[1]
    return begin, (start[0] + last * steps[0], start[1] + last * steps[1])


def _scale(
    axis: Axis, values: list[float], *, upright: bool = False, margin: float = 0.0, filled: bool = False
) -> Scale:
    """The ends of an axis. A vertical axis has a margin above and below the data and starts at 0 if possible; with
    areas
    or bars it must."""
    shown = [value for value in values if math.isfinite(value) and (value > 0 or not axis.log)]
    if axis.names:
        shown = [0.0, len(axis.names) - 1.0]
        margin = margin or 0.5
    least, most = min(shown, default=1.0), max(shown, default=1.0)
    if axis.log:
        room = ROOM if upright else 1.0
        low = _round_down(least / room) if axis.low is None else axis.low
        high = _round_up(most * room) if axis.high is None else axis.high
        return Scale(axis, low, high) if low < high else Scale(axis, min(low, high) / 2, max(low, high) * 2)
    least, most = least - margin, most + margin
    if upright and least >= 0 and (filled or least <= FAR_FROM_ZERO * most or least == most):
        least = 0.0
    if filled:
        most = max(most, 0.0)
    if least == most:
        least, most = least - 0.5, most + 0.5
    if upright:  # a margin above the highest value, up to a round number
        step = _even_step(least if axis.low is None else axis.low, most if axis.high is None else axis.high, 6)
        most = math.ceil(most / step - 1e-9) * step
        least = math.floor(least / step + 1e-9) * step
    low, high = least if axis.low is None else axis.low, most if axis.high is None else axis.high
    return (
        Scale(axis, low, high)
        if low < high
        else Scale(axis, low, low + 1)
        if axis.high is None
        else Scale(axis, high - 1, high)
    )


def _even_step(low: float, high: float, most: int) -> float:
    rough = abs(high - low) / max(most, 1) or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    return next(times * power for times in (1, 2, 5, 10) if times * power >= rough * (1 - 1e-9))


def _even_ticks(low: float, high: float, most: int) -> list[float]:
    step = _even_step(low, high, most)
    first = math.ceil(low / step - 1e-9)
    return [round(first + count, 9) * step for count in range(math.floor(high / step + 1e-9) - first + 1)]


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 5), (1, 3), (1,)):
        ticks = [step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade * 1.000001]
        ticks = [tick for tick in ticks if tick <= high * 1.000001]
        if len(ticks) <= most and len(ticks) > 1:
            return ticks
    if len(decades) > 2:
        every = 3 * -(-len(decades) // (3 * max(most, 1)))  # in steps of the prefixes
        return [10.0**decade for decade in decades if decade % every == 0]
    return _even_ticks(low, high, most)


def _round_down(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return max((step * power for step in (1, 2, 5) if step * power <= value * 1.000001), default=power)


def _round_up(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return min((step * power for step in (1, 2, 5, 10) if step * power >= value * 0.999999), default=10 * power)
