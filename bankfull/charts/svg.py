"""A chart as one <svg> element without scripts, ids or external resources, so that a page can contain many."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from xml.sax.saxutils import escape, quoteattr

from bankfull.charts.model import Chart, Mark, Point, Series
from bankfull.charts.places import Box, around, best
from bankfull.charts.scale import Scale, clipped, half_bar, scales_of, visible_runs

Palette = dict[str, str | tuple[str, ...]]
LIGHT: Palette = {
    "ground": "#ffffff",
    "ink": "#1f2328",
    "muted": "#57606a",
    "grid": "#d8dee4",
    "series": ("#0969da", "#c2500a", "#1a7f37", "#8250df", "#bf3989", "#8a6100", "#0e7490", "#6e7781"),
}
DARK: Palette = {
    "ground": "#0d1117",
    "ink": "#e6edf3",
    "muted": "#9198a1",
    "grid": "#30363d",
    "series": ("#58a6ff", "#f0883e", "#3fb950", "#bc8cff", "#f778ba", "#d29922", "#39c5cf", "#8b949e"),
}
COLORS = len(LIGHT["series"])
DASHES = ("", "7 4", "2 3", "9 3 2 3")
FONT, SMALL = 13, 12
WIDE = 0.58
"""Mean width of a character, as a fraction of the font size. An estimate: the reader's font is unknown."""
LINE = 18
GAP = 8.0
_VARIABLE = re.compile(r"var\(--chart-([a-z]+)(?:-(\d+))?\)")
_UNSHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def draw(chart: Chart, width: int, height: int, theme: str) -> str:
    if theme not in ("auto", "light", "dark"):
        raise ValueError(f"The theme {theme!r} is unknown; use auto, light or dark.")
    x, y = scales_of(chart)
    ticks = y.ticks(8)
    left = 34 + max((_width(text) for _, text in ticks), default=0)
    plot = Box(left, 40 if chart.title else 16, width - 22, height - 50)
    legend = list(_legend(chart.series, plot.left, plot.right, height + 4))
    whole = height + (LINE * len({top for _, top, _ in legend}) + 8 if legend else 0)
    parts = [
        f"<title>{_text(chart.title)}</title>",
        f"<desc>{_text(chart.description or describe(chart))}</desc>",
        _style(theme),
        f'<rect width="{width}" height="{whole}" style="fill:var(--chart-ground)"/>',
        *_frame(chart, plot, x, y, ticks),
        *_series(chart, plot, x, y),
        *_marks(chart.marks, plot, x, y),
    ]
    parts += [line for _, _, line in legend]
    body = "\n".join(part for part in parts if part)
    markup = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="bankfull-chart" role="img" width="{width}" height="{whole}" '
        f'viewBox="0 0 {width} {whole}" font-family="system-ui, sans-serif" font-size="{SMALL}">\n{body}\n</svg>\n'
    )
    return markup if theme == "auto" else _fixed(markup, LIGHT if theme == "light" else DARK)


def describe(chart: Chart) -> str:
    """Alternative text: the axes, and the first and last point of each series."""
    x, y = scales_of(chart)
    told = [f"{y.title} against {x.title}."]
    for series in chart.series:
        ends = [f"{x.shown(a)}, {y.shown(b)}" for a, b in (*series.points[:1], *series.points[1:][-1:])]
        told.append(f"{series.name}: {' to '.join(ends) or 'no points'}.")
    told += [f"{mark.label}: {x.shown(mark.x)}, {y.shown(mark.y)}." for mark in chart.marks]
    return " ".join(told)


def _style(theme: str) -> str:
    if theme != "auto":
        return ""

    def variables(palette: Palette) -> str:
        flat = {name: value for name, value in palette.items() if isinstance(value, str)}
        flat |= {f"series-{number}": value for number, value in enumerate(palette["series"])}
        return ";".join(f"--chart-{name}:{value}" for name, value in flat.items())

    return (
        f"<style>.bankfull-chart{{max-width:100%;height:auto;{variables(LIGHT)}}}"
        f"@media (prefers-color-scheme:dark){{.bankfull-chart{{{variables(DARK)}}}}}</style>"
    )


def _fixed(svg: str, palette: Palette) -> str:
    def value(found: re.Match[str]) -> str:
        color = palette[found[1]]
        return color if isinstance(color, str) else color[int(found[2])]

    return _VARIABLE.sub(value, svg)


def _frame(chart: Chart, plot: Box, x: Scale, y: Scale, y_ticks: Sequence[tuple[float, str]]) -> Iterator[str]:
    """Title, grid, ticks and axis labels."""
    ink, muted, grid = "fill:var(--chart-ink)", "fill:var(--chart-muted)", "stroke:var(--chart-grid)"
    if chart.title:
        yield _label(plot.left, 24, chart.title, f"{ink};font-weight:600", size=FONT + 2)
    for at, text in y_ticks:
        down = _number(plot.bottom - at * (plot.bottom - plot.top))
        yield f'<line x1="{_number(plot.left)}" x2="{_number(plot.right)}" y1="{down}" y2="{down}" style="{grid}"/>'
        yield _label(plot.left - 7, float(down) + 4, text, muted, anchor="end")
    widest = max((_width(text) for _, text in x.ticks(10)), default=10)
    for at, text in x.ticks(max(2, min(10, int((plot.right - plot.left) / (widest + 24))))):
        across = _number(plot.left + at * (plot.right - plot.left))
        yield f'<line x1="{across}" x2="{across}" y1="{_number(plot.top)}" y2="{_number(plot.bottom)}" style="{grid}"/>'
        yield _label(float(across), plot.bottom + 18, text, muted, anchor="middle")
    corners = f"M{_number(plot.left)} {_number(plot.top)}V{_number(plot.bottom)}H{_number(plot.right)}"
    yield f'<path d="{corners}" style="fill:none;stroke:var(--chart-muted)"/>'
    yield _label((plot.left + plot.right) / 2, plot.bottom + 38, x.title, ink, anchor="middle")
    middle = (plot.top + plot.bottom) / 2
    turned = f' transform="rotate(-90 16 {_number(middle)})"'
    yield _label(16, middle, y.title, ink, anchor="middle", more=turned)


def _series(chart: Chart, plot: Box, x: Scale, y: Scale) -> Iterator[str]:
    bars = [series for series in chart.series if series.kind == "bars"]
    # Filled shapes first, so that lines and points are drawn over them.
    numbered = sorted(enumerate(chart.series), key=lambda pair: {"area": 0, "bars": 0, "line": 1}.get(pair[1].kind, 2))
    for number, series in numbered:
        yield f"<g aria-label={quoteattr(_clean(series.name))}>"
        if series.kind == "bars":
            yield from _bars(series, number, bars.index(series), len(bars), half_bar(bars), plot, x, y)
        elif series.kind == "points":
            for point, place in _shown_points(series, x, y):
                yield _dot(plot, place, _color(number), f"{series.name}: {x.shown(point[0])}, {y.shown(point[1])}")
        else:
            yield from _line(series, number, plot, x, y)
        yield "</g>"


def _line(series: Series, number: int, plot: Box, x: Scale, y: Scale) -> Iterator[str]:
    stroke = f"fill:none;stroke:var(--chart-series-{number % COLORS});stroke-width:2;stroke-linejoin:round"
    dash = DASHES[1] if series.dashed else DASHES[number // COLORS % len(DASHES)]
    stroke += f";stroke-dasharray:{dash}" if dash else ""
    for run in visible_runs(series.points, x, y):
        places = [place for _, place in run]
        for stretch in _stretches(places):
            if series.kind == "area":
                floor = min(max(_baseline(y), 0.0), 1.0)
                outline = [(stretch[0][0], floor), *stretch, (stretch[-1][0], floor)]
                yield f'<path d="{_path(outline, plot)}Z" style="fill:{_color(number)};fill-opacity:0.25"/>'
            yield f'<path d="{_path(stretch, plot)}" style="{stroke}"/>'
        if len(places) == 1 and all(0 <= at <= 1 for at in places[0]):
            yield _dot(plot, places[0], _color(number), series.name)


def _stretches(places: Sequence[Point]) -> Iterator[list[Point]]:
    """A line clipped to the plot."""
    stretch: list[Point] = []
    for start, end in pairwise(places):
        part = clipped(start, end)
        if part is None or (stretch and stretch[-1] != part[0]):
            if stretch:
                yield stretch
            stretch = []
        if part is not None:
            stretch = [*stretch, part[1]] if stretch else list(part)
    if stretch:
        yield stretch


def _bars(
    series: Series, number: int, place: int, count: int, half: float, plot: Box, x: Scale, y: Scale
) -> Iterator[str]:
    floor = min(max(_baseline(y), 0.0), 1.0)
    room = 2 * half / count
    for across, value in series.points:
        begin, end, up = x.at(across - half + place * room), x.at(across - half + (place + 1) * room), y.at(value)
        if begin is None or end is None or up is None or end < 0 or begin > 1:
            continue
        corners = _at(plot, (max(begin, 0), max(up, floor))), _at(plot, (min(end, 1), min(up, floor)))
        (left, top), (right, bottom) = corners
        tip = escape(_clean(f"{series.name}: {x.shown(across)}, {y.shown(value)}"))
        yield (
            f'<rect x="{_number(left)}" y="{_number(max(top, plot.top))}" width="{_number(max(right - left, 0.5))}" '
            f'height="{_number(max(bottom - max(top, plot.top), 0))}" style="fill:{_color(number)};fill-opacity:0.85">'
            f"<title>{tip}</title></rect>"
        )


def _marks(marks: Sequence[Mark], plot: Box, x: Scale, y: Scale) -> Iterator[str]:
    placed: list[tuple[Mark, Point]] = []
    for mark in marks:
        across, up = x.at(mark.x), y.at(mark.y)
        if across is not None and up is not None and 0 <= across <= 1 and 0 <= up <= 1:
            placed.append((mark, (across, up)))
    taken = []
    for mark, place in placed:
        left, top = _at(plot, place)
        taken.append(Box(left - 5, top - 5, left + 5, top + 5))
        color = "var(--chart-ink)" if mark.series is None else _color(mark.series)
        yield _dot(plot, place, color, f"{mark.label}: {x.shown(mark.x)}, {y.shown(mark.y)}")
    for mark, place in placed:
        left, top = _at(plot, place)
        box, _ = best(around(left, top, _width(mark.label), 15, GAP, 15), taken, plot)
        taken.append(box)
        if box.top > top + 2 or box.bottom < top - 2:  # not next to its point: draw a line to it
            across, edge = min(max(left, box.left), box.right), box.bottom if box.bottom < top else box.top
            yield (
                f'<line x1="{_number(left)}" y1="{_number(top)}" x2="{_number(across)}" y2="{_number(edge)}" '
                f'style="stroke:var(--chart-muted);stroke-width:0.75"/>'
            )
        yield (
            f'<rect x="{_number(box.left - 1)}" y="{_number(box.top)}" width="{_number(box.right - box.left + 2)}" '
            f'height="15" style="fill:var(--chart-ground);fill-opacity:0.75"/>'
        )
        yield _label(box.left, box.top + 11.5, mark.label, "fill:var(--chart-ink)")


def _legend(series: Sequence[Series], left: float, right: float, top: float) -> Iterator[tuple[float, float, str]]:
    """Legend entries with their positions, in as many lines as needed; none for a single series without a name."""
    if not any(one.name for one in series):
        return
    across = left
    for number, one in enumerate(series):
        room = 30 + _width(one.name) + 18
        if across > left and across + room > right:
            across, top = left, top + LINE
        color = _color(number)
        if one.kind == "line":
            dash = DASHES[1] if one.dashed else DASHES[number // COLORS % len(DASHES)]
            swatch = (
                f'<line x1="{_number(across)}" x2="{_number(across + 22)}" y1="{_number(top)}" y2="{_number(top)}" '
                f'style="stroke:{color};stroke-width:2.5{";stroke-dasharray:" + dash if dash else ""}"/>'
            )
        elif one.kind == "points":
            swatch = f'<circle cx="{_number(across + 11)}" cy="{_number(top)}" r="4" style="fill:{color}"/>'
        else:
            swatch = (
                f'<rect x="{_number(across)}" y="{_number(top - 6)}" width="22" height="12" '
                f'style="fill:{color};fill-opacity:{0.25 if one.kind == "area" else 0.85}"/>'
            )
        yield across, top, swatch + _label(across + 28, top + 4, one.name, "fill:var(--chart-ink)")
        across += room


def _shown_points(series: Series, x: Scale, y: Scale) -> Iterator[tuple[Point, Point]]:
    for run in visible_runs(series.points, x, y):
        yield from ((point, place) for point, place in run if all(0 <= at <= 1 for at in place))


def _dot(plot: Box, place: Point, color: str, tip: str) -> str:
    left, top = _at(plot, place)
    return (
        f'<circle cx="{_number(left)}" cy="{_number(top)}" r="4" '
        f'style="fill:{color};stroke:var(--chart-ground)"><title>{_text(tip)}</title></circle>'
    )


def _label(
    left: float, top: float, text: str, style: str, *, size: int = SMALL, anchor: str = "start", more: str = ""
) -> str:
    return (
        f'<text x="{_number(left)}" y="{_number(top)}" font-size="{size}" text-anchor="{anchor}" style="{style}"{more}>'
        f"{_text(text)}</text>"
    )


def _baseline(y: Scale) -> float:
    """The baseline of bars and areas: 0, or the low end of a scale without 0."""
    at = y.at(0.0)
    return 0.0 if at is None else at


def _color(number: int) -> str:
    return f"var(--chart-series-{number % COLORS})"


def _path(places: Sequence[Point], plot: Box) -> str:
    return "M" + "L".join(f"{_number(left)} {_number(top)}" for left, top in (_at(plot, place) for place in places))


def _at(plot: Box, place: Point) -> Point:
    return plot.left + place[0] * (plot.right - plot.left), plot.bottom - place[1] * (plot.bottom - plot.top)


def _width(text: str) -> float:
    return WIDE * SMALL * len(text)


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _clean(text: str) -> str:
    """Escape untrusted names, and remove characters that XML does not allow."""
    return _UNSHOWN.sub("\ufffd", text)


def _text(text: str) -> str:
    return escape(_clean(text))
