"""A chart as lines of text, in braille dots or ASCII."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise

from bankfull.charts.model import Chart, Point, Series
from bankfull.charts.places import Box, around, best
from bankfull.charts.scale import Scale, clipped, half_bar, scales_of, visible_runs

BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a braille character, by row and column of its dots."""
DOTS_ACROSS, DOTS_DOWN = 2, 4
ESCAPES = (34, 33, 32, 35, 36, 31, 94, 90)
"""Terminal colours, in the order of the SVG colours."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SMALLEST = 24, 4
LARGEST_LABEL = 40
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def draw(chart: Chart, width: int, height: int, *, color: bool, plain: bool) -> str:
    width, height = max(width, SMALLEST[0]), max(height, SMALLEST[1])
    x, y = scales_of(chart)
    ticks = y.ticks(max(2, height // 3))
    gutter = min(max((len(text) for _, text in ticks), default=0), width // 3)
    sheet = Sheet(width - gutter - 2, height, color=color, plain=plain)
    _draw_series(sheet, chart.series, x, y)
    numbered = _draw_marks(sheet, chart, x, y)
    by_row = {sheet.row_of(at): text[:gutter] for at, text in ticks}
    corner, side, floor = ("+", "|", "-") if plain else ("└", "│", "─")
    lines = [_clean(chart.title)[:width]] if chart.title else []
    lines.append(_clean(y.title)[:width])
    lines += [f"{by_row.get(row, ''):>{gutter}} {side}{line}" for row, line in enumerate(sheet.lines())]
    lines.append(f"{'':>{gutter}} {corner}{floor * sheet.width}")
    lines.append(" " * (gutter + 2) + _tick_line(x, sheet.width))
    lines.append(f"{_clean(x.title):>{width}}"[-width:])
    lines += _legend(chart.series, width, color)
    lines += [f"{number}  {label}"[:width] for number, label in numbered]
    return "\n".join(line.rstrip() for line in lines) + "\n"


@dataclass(slots=True)
class Sheet:
    """A grid of dots with characters over them; the first row is at the top."""

    width: int
    height: int
    color: bool
    plain: bool
    dots: dict[tuple[int, int], int] = field(default_factory=dict)
    owners: dict[tuple[int, int], int] = field(default_factory=dict)
    letters: dict[tuple[int, int], tuple[str, int | None]] = field(default_factory=dict)

    def cell_of(self, place: Point) -> tuple[int, int]:
        return min(int(place[0] * self.width), self.width - 1), self.row_of(place[1])

    def row_of(self, up: float) -> int:
        return self.height - 1 - min(int(up * self.height), self.height - 1)

    def dot(self, across: int, down: int, owner: int) -> None:
        cell = across // DOTS_ACROSS, down // DOTS_DOWN
        if 0 <= cell[0] < self.width and 0 <= cell[1] < self.height:
            self.dots[cell] = self.dots.get(cell, 0) | BITS[down % DOTS_DOWN][across % DOTS_ACROSS]
            self.owners[cell] = owner

    def line(self, start: Point, end: Point, owner: int) -> None:
        part = clipped(start, end)
        if part is None:
            return
        (a, b), (c, d) = (self._dot_of(place) for place in part)
        steps = max(abs(c - a), abs(d - b), 1)
        for step in range(steps + 1):
            self.dot(round(a + (c - a) * step / steps), round(b + (d - b) * step / steps), owner)

    def fill(self, across: tuple[float, float], up: tuple[float, float], owner: int, every: int = 1) -> None:
        """A rectangle of dots, filled completely or with every second dot."""
        begin, top = self._dot_of((min(max(across[0], 0.0), 1.0), min(max(max(up), 0.0), 1.0)))
        end, bottom = self._dot_of((min(max(across[1], 0.0), 1.0), min(max(min(up), 0.0), 1.0)))
        for column in range(begin, max(end, begin + 1)):
            for row in range(top, bottom + 1):
                if (column + row) % every == 0:
                    self.dot(column, row, owner)

    def write(self, column: int, row: int, text: str, owner: int | None = None) -> None:
        for offset, letter in enumerate(text):
            if 0 <= column + offset < self.width and 0 <= row < self.height:
                self.letters[column + offset, row] = letter, owner

    def lines(self) -> Iterator[str]:
        for row in range(self.height):
            cells = (self._cell(column, row) for column in range(self.width))
            yield "".join(
                _tinted("".join(letter for letter, _ in stretch), owner, self.color)
                for owner, stretch in groupby(cells, key=lambda cell: cell[1])
            )

    def _cell(self, column: int, row: int) -> tuple[str, int | None]:
        """The character of a cell, and the number of its series."""
        cell = column, row
        if cell in self.letters:
            return self.letters[cell]
        dots = self.dots.get(cell, 0)
        if not dots:
            return " ", None
        return "." if self.plain else chr(0x2800 + dots), self.owners[cell]

    def _dot_of(self, place: Point) -> tuple[int, int]:
        across, down = self.width * DOTS_ACROSS, self.height * DOTS_DOWN
        return min(int(place[0] * across), across - 1), down - 1 - min(int(place[1] * down), down - 1)


def _draw_series(sheet: Sheet, all_series: Sequence[Series], x: Scale, y: Scale) -> None:
    bars = [series for series in all_series if series.kind == "bars"]
    half, zero = half_bar(bars), y.at(0.0)
    floor = 0.0 if zero is None else zero
    for number, series in enumerate(all_series):
        if series.kind == "bars":
            room = 2 * half / len(bars)
            shift = bars.index(series) * room - half
            for across, value in series.points:
                left, right, up = x.at(across + shift), x.at(across + shift + room), y.at(value)
                if left is not None and right is not None and up is not None:
                    sheet.fill((left, right), (floor, up), number)
            continue
        for run in visible_runs(series.points, x, y):
            places = [place for _, place in run]
            if series.kind == "points" or len(places) == 1:
                for place in places:
                    if _inside(place):
                        sheet.write(*sheet.cell_of(place), _letter(number), number)
                continue
            for start, end in pairwise(places):
                if series.kind == "area":
                    _shade(sheet, start, end, floor, number)
                sheet.line(start, end, number)
    if len(all_series) > 1:
        _name_lines(sheet, all_series, x, y)


def _name_lines(sheet: Sheet, all_series: Sequence[Series], x: Scale, y: Scale) -> None:
    """Label each line with its letter, at its last point without another letter."""
    for number, series in enumerate(all_series):
        if series.kind in ("points", "bars"):
            continue
        places = [place for run in visible_runs(series.points, x, y) for _, place in run]
        parts = [clipped(start, end) for start, end in pairwise(places)]
        ends = [end for part in parts if part is not None for end in (part[0], _middle(*part), part[1])]
        for place in reversed(ends):
            column, row = sheet.cell_of(place)
            if (column, row) not in sheet.letters:
                sheet.write(column, row, _letter(number), number)
                break


def _draw_marks(sheet: Sheet, chart: Chart, x: Scale, y: Scale) -> list[tuple[str, str]]:
    """Labels next to their points; if there is no space, a number with a legend."""
    placed = []
    for mark in chart.marks:
        across, up = x.at(mark.x), y.at(mark.y)
        if across is not None and up is not None and _inside((across, up)):
            placed.append((mark, sheet.cell_of((across, up))))
    taken = [Box(column, row, column + 1, row + 1) for column, row in (*sheet.letters, *(cell for _, cell in placed))]
    numbered: list[tuple[str, str]] = []
    within = Box(0, 0, sheet.width, sheet.height)
    for mark, (column, row) in placed:
        label = _clean(mark.label)[:LARGEST_LABEL]
        candidates = around(column + 0.5, row + 0.5, len(label) + 2, 1, 0.5, 1, rows=1)
        box, covered = best((Box(*(int(side) for side in box)) for box in candidates), taken, within)
        if covered:
            numbered.append((str(len(numbered) + 1), _clean(mark.label)))
            sheet.write(column, row, numbered[-1][0], mark.series)
            continue
        sheet.write(column, row, "*" if sheet.plain else "●", mark.series)
        sheet.write(int(box.left) + 1, int(box.top), label)
        taken.append(box)
    return numbered


def _shade(sheet: Sheet, start: Point, end: Point, floor: float, owner: int) -> None:
    columns = sheet.width * DOTS_ACROSS
    part = clipped(start, end, (0.0, -1e9), (1.0, 1e9))
    if part is None:
        return
    (begin, low), (last, high) = part
    for column in range(int(begin * columns), int(last * columns) + 1):
        share = (column / columns - begin) / (last - begin) if last > begin else 0.0
        up = low + (high - low) * min(max(share, 0.0), 1.0)
        sheet.fill((column / columns, (column + 1) / columns), (floor, up), owner, every=2)


def _tick_line(x: Scale, width: int) -> str:
    ticks = x.ticks(max(2, width // 10))
    line, used = [" "] * width, -1
    for at, text in ticks:
        begin = min(max(round(at * (width - 1)) - len(text) // 2, 0), width - len(text))
        if begin > used and text:
            line[begin : begin + len(text)] = text
            used = begin + len(text)
    return "".join(line)


def _legend(all_series: Sequence[Series], width: int, color: bool) -> list[str]:
    if len(all_series) < 2 and not any(series.kind == "points" for series in all_series):
        return []
    lines, used = [""], 0
    for number, series in enumerate(all_series):
        name = _clean(series.name)[: width - 4]
        room = len(name) + 5
        if used and used + room > width:
            lines.append("")
            used = 0
        lines[-1] += f"{_tinted(_letter(number), number, color)}  {name}   "
        used += room
    return lines


def _letter(number: int) -> str:
    return LETTERS[number % len(LETTERS)]


def _tinted(text: str, owner: int | None, color: bool) -> str:
    return f"\x1b[{ESCAPES[owner % len(ESCAPES)]}m{text}\x1b[0m" if color and owner is not None else text


def _middle(start: Point, end: Point) -> Point:
    return (start[0] + end[0]) / 2, (start[1] + end[1]) / 2


def _inside(place: Point) -> bool:
    return 0 <= place[0] <= 1 and 0 <= place[1] <= 1


def _clean(text: str) -> str:
    """Remove control characters from untrusted names: a terminal would execute them."""
    return _CONTROLS.sub("\ufffd", text)
