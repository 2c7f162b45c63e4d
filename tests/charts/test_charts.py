"""Charts: the same data as SVG, as text, and in files."""

from __future__ import annotations

import io
import math
import re
import sys
import zlib
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import resvg_py
import ttf_opensans

from bankfull.charts import Axis, Chart, Kind, Mark, Series, print_chart, save
from bankfull.charts.places import Box, around, best
from bankfull.charts.scale import clipped, scales_of, spelled
from bankfull.errors import ConfigError

SVG = "{http://www.w3.org/2000/svg}"
TINTED = re.compile("\x1b\\[\\d+m")


def line_chart(**changes: object) -> Chart:
    parts: dict[str, object] = {
        "title": "Latency against batch",
        "x": Axis("batch", log=True),
        "y": Axis("time", unit="s"),
        "series": [Series("decode", [(1, 0.01), (8, 0.011), (64, 0.02)]), Series("seen", [(8, 0.013)], "points")],
        "marks": [Mark(8, 0.011, "here")],
    }
    return Chart(**{**parts, **changes})  # type: ignore[arg-type]


def parsed(chart: Chart) -> ElementTree.Element:
    return ElementTree.fromstring(chart.svg())


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def paths(root: ElementTree.Element, name: str) -> list[list[tuple[float, float]]]:
    """The corners of each line of a series."""
    (group,) = [element for element in root.iter(f"{SVG}g") if element.get("aria-label") == name]
    drawn = [path.get("d") or "" for path in group.iter(f"{SVG}path")]
    return [[tuple(map(float, pair.split())) for pair in re.split("[ML]", d.rstrip("Z"))[1:]] for d in drawn]  # type: ignore[misc]


def test_an_svg_says_what_it_shows_to_those_who_cannot_see_it() -> None:
    root = parsed(line_chart())
    assert root.get("role") == "img" and root[0].tag == f"{SVG}title" and root[0].text == "Latency against batch"
    described = root[1].text or ""
    assert root[1].tag == f"{SVG}desc"
    for part in ("time against batch", "decode: 1, 10 ms to 64, 20 ms", "here: 8, 11 ms"):
        assert part in described, part
    assert parsed(line_chart(description="In short.")).find(f"{SVG}desc").text == "In short."  # type: ignore[union-attr]


def test_an_svg_shows_axes_legend_marks_and_every_point() -> None:
    root = parsed(line_chart())
    shown = texts(root)
    for part in ("Latency against batch", "batch", "time", "decode", "seen", "here", "1", "10", "10 ms"):
        assert part in shown, part
    assert len(list(root.iter(f"{SVG}circle"))) == 3  # one point, one mark, one in the legend


def test_an_svg_follows_the_readers_system_or_has_fixed_colors() -> None:
    chart = line_chart()
    assert "prefers-color-scheme:dark" in chart.svg() and "var(--chart-ink)" in chart.svg()
    for theme in ("light", "dark"):
        fixed = chart.svg(theme=theme)
        assert "var(" not in fixed and "<style" not in fixed and "#" in fixed
        ElementTree.fromstring(fixed)
    assert chart.svg(theme="light") != chart.svg(theme="dark")
    with pytest.raises(ValueError, match="theme"):
        chart.svg(theme="pink")  # type: ignore[arg-type]


def test_nothing_in_an_svg_comes_from_outside_or_needs_an_id() -> None:
    chart = line_chart().svg()
    assert re.findall(r"https?://[^\s\"']+", chart) == ["http://www.w3.org/2000/svg"]
    assert " id=" not in chart and "<script" not in chart and "href" not in chart


def test_names_from_files_can_not_break_out() -> None:
    nasty = "<script>&\"'\x00\x1b[31m\ud800"
    chart = line_chart(title=nasty, series=[Series(nasty, [(1, 1), (2, 2)])], marks=[Mark(1, 1, nasty)])
    root = parsed(chart)
    assert not list(root.iter(f"{SVG}script")) and nasty[:9] in (root[0].text or "")
    assert "\x1b" not in chart.text() and "\x00" not in chart.text()


def test_places_on_a_linear_and_a_log_axis() -> None:
    x, y = scales_of(line_chart())
    assert [x.at(value) for value in (1, 10, 100)] == [0, pytest.approx(0.5), 1]
    assert x.at(0) is None and x.at(-1) is None and x.at(math.inf) is None
    assert y.at(0) == 0 and y.at(0.02) == 1 and y.at(math.nan) is None


@pytest.mark.parametrize(
    ("axis", "values", "expected"),
    [
        (Axis("", log=True), (1, 1000), ["1", "10", "100", "1k"]),
        (Axis("", log=True, unit="B"), (1e3, 1e12), ["1 kB", "1 MB", "1 GB", "1 TB"]),
        (Axis("", unit="s"), (0, 0.004), ["0 s", "1 ms", "2 ms", "3 ms", "4 ms"]),
        (Axis("", unit="%"), (0, 100), ["0%", "20%", "40%", "60%", "80%", "100%"]),
        (Axis("", unit="FLOP/s"), (0, 2e12), ["0", "500G", "1T", "1.5T", "2T"]),
        (Axis("", names=("a", "b", "c")), (0, 2), ["a", "b", "c"]),
    ],
    ids=range(6),
)
def test_ticks_are_round_and_carry_units(axis: Axis, values: tuple[float, float], expected: list[str]) -> None:
    chart = Chart("", axis, Axis(""), [Series("", [(value, 1) for value in values])])
    found = [text for _, text in scales_of(chart)[0].ticks(6)]
    assert [text for text in found if text in expected] == expected
    assert len(found) <= 8


def test_long_units_stand_beside_the_axis_only() -> None:
    _, y = scales_of(line_chart(y=Axis("work", unit="FLOP/s")))
    assert y.title == "work (FLOP/s)" and "FLOP" not in y.shown(1e9)


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (0, "", "0"),
        (0, "s", "0 s"),
        (1234567, "", "1.23M"),
        (0.25, "", "0.25"),
        (2e-5, "s", "20 us"),
        (90, "s", "90 s"),
        (999.9e9, "B", "1 TB"),
        (5e18, "", "5000P"),
        (-3000, "", "-3k"),
        (12.5, "%", "12.5%"),
        (math.inf, "", "inf"),
    ],
)
def test_values_are_spelled_as_a_reader_would(value: float, unit: str, expected: str) -> None:
    assert spelled(value, unit) == expected


def test_a_line_is_cut_at_the_borders_of_the_plot() -> None:
    def drawn(*points: tuple[float, float]) -> list[list[tuple[float, float]]]:
        axis = Axis("", low=0, high=10)
        return paths(parsed(line_chart(x=axis, y=axis, series=[Series("s", points)])), "s")

    assert drawn((-5, -5), (15, 15)) == drawn((0, 0), (10, 10)) != []
    assert len(drawn((5, 5), (5, 15), (6, 15), (6, 5))) == 2
    assert drawn((20, 1), (30, 1)) == []


def test_clipping() -> None:
    assert clipped((0.2, 0.2), (0.8, 0.8)) == ((0.2, 0.2), (0.8, 0.8))
    assert clipped((-1, 0.5), (2, 0.5)) == ((0, 0.5), (1, 0.5))
    assert clipped((-1, 2), (2, 2)) is None and clipped((2, 0), (3, 1)) is None
    assert clipped((0.5, -1), (0.5, 0.5)) == ((0.5, 0), (0.5, 0.5))


def test_what_has_no_place_breaks_a_line_in_two() -> None:
    points = [(1, 1), (2, 2), (3, math.nan), (4, 2), (5, 1)]
    assert len(paths(parsed(line_chart(series=[Series("s", points)], marks=[])), "s")) == 2


def test_bars_of_several_series_stand_side_by_side_on_the_baseline() -> None:
    chart = Chart(
        "",
        Axis("", names=("queue", "decode")),
        Axis("", unit="s"),
        [Series("spent", [(0, 1), (1, 3)], "bars"), Series("limit", [(0, 0.5), (1, 2)], "bars")],
    )
    root = parsed(chart)
    groups = {group.get("aria-label"): list(group.iter(f"{SVG}rect")) for group in root.iter(f"{SVG}g")}
    spent, limit = groups["spent"], groups["limit"]

    def number(bar: ElementTree.Element, name: str) -> float:
        return float(bar.get(name) or "nan")

    assert number(spent[0], "x") + number(spent[0], "width") == pytest.approx(number(limit[0], "x"), abs=0.2)
    assert number(spent[1], "height") == pytest.approx(3 * number(spent[0], "height"), abs=0.5)
    feet = {round(number(bar, "y") + number(bar, "height")) for bar in spent + limit}
    assert len(feet) == 1
    assert "queue" in chart.text() and "a  spent   b  limit" in chart.text()


@pytest.mark.parametrize("kind", ["line", "points", "area", "bars"])
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    "points",
    [
        [],
        [(0, 0)],
        [(1, 1)],
        [(1, 5), (2, 5)],
        [(-3, -2), (4, 1e-30)],
        [(math.nan, 1), (1, math.inf)],
        [(1e300, 1e300)],
    ],
    ids=range(7),
)
def test_any_data_can_be_drawn(kind: Kind, log: bool, points: list[tuple[float, float]]) -> None:
    chart = Chart("t", Axis("x", log=log), Axis("y", log=log), [Series("s", points, kind)], [Mark(1, 1, "m")])
    ElementTree.fromstring(chart.svg())
    assert "nan" not in chart.svg(theme="light").replace("s: nan", "")
    for width, height in ((80, 20), (1, 1)):
        assert chart.text(width, height)


@pytest.mark.parametrize("ends", [(1, 1), (2, 1), (math.nan, None), (None, math.inf)])
def test_an_axis_that_cannot_be_is_refused(ends: tuple[float | None, float | None]) -> None:
    with pytest.raises(ValueError, match="cannot go from"):
        Axis("x", low=ends[0], high=ends[1])
    with pytest.raises(ValueError, match="logarithmic"):
        Axis("x", log=True, low=0)
    with pytest.raises(ValueError, match="drawn as"):
        Series("s", [], "pie")  # type: ignore[arg-type]


def test_labels_avoid_each_other_and_the_border() -> None:
    taken = [Box(0, 0, 10, 10)]
    within = Box(0, 0, 100, 100)
    box, covered = best(around(5, 5, 20, 4, 2, 5), taken, within)
    assert covered == 0 and box.shared(taken[0]) == 0 and box.shared(within) == box.area
    marks = [Mark(8, 0.011, f"operation {number}") for number in range(6)]
    root = parsed(line_chart(marks=marks))
    places = {(e.get("x"), e.get("y")) for e in root.iter(f"{SVG}text") if (e.text or "").startswith("operation")}
    assert len(places) == 6


def test_text_has_the_width_and_height_that_were_asked_for() -> None:
    for width, height in ((80, 20), (40, 8), (120, 30)):
        lines = line_chart().text(width, height).splitlines()
        assert max(map(len, lines)) <= width
        assert sum("│" in line for line in lines) == height


def test_text_shows_where_a_line_runs() -> None:
    rising = Chart("", Axis("x", low=0, high=1), Axis("y", low=0, high=1), [Series("s", [(0, 0), (1, 1)])])
    rows = [line.partition("│")[2] for line in rising.text(60, 10).splitlines() if "│" in line]
    first = [next((column for column, cell in enumerate(row) if cell != " "), None) for row in rows]
    assert None not in first and first == sorted(first, reverse=True)  # type: ignore[type-var]


def test_every_series_and_mark_can_be_told_apart_in_text() -> None:
    text = line_chart().text(80, 15)
    assert re.search("●.here", text) and "a  decode   b  seen" in text
    body = "\n".join(line for line in text.splitlines() if "│" in line)
    assert body.count("b") == 1 and "a" in body


def test_marks_without_room_get_numbers() -> None:
    marks = [Mark(8, 0.011, f"an operation with a long name, {number}") for number in range(12)]
    text = line_chart(marks=marks).text(60, 6)
    assert re.search(r"^1  an operation with a long name, \d+$", text, re.MULTILINE)


def test_plain_text_draws_with_ascii_alone() -> None:
    text = line_chart().text(80, 15, plain=True)
    assert text.isascii() and "*" in text and "|" in text


def test_colors_change_nothing_but_the_escapes() -> None:
    chart = line_chart()
    assert TINTED.sub("", chart.text(80, 15, color=True)) == chart.text(80, 15)
    assert TINTED.search(chart.text(80, 15, color=True))


class Terminal(io.TextIOWrapper):
    def __init__(self, encoding: str) -> None:
        super().__init__(io.BytesIO(), encoding=encoding)

    def isatty(self) -> bool:
        return True

    def shown(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode(self.encoding)  # type: ignore[attr-defined]


def test_a_terminal_gets_what_it_can_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "70")
    modern, old = Terminal("utf-8"), Terminal("ascii")
    print_chart(line_chart(), stream=modern)
    print_chart(line_chart(), stream=old)
    assert "\x1b[" in modern.shown() and re.search("[\u2801-\u28ff]", modern.shown())
    assert max(len(TINTED.sub("", line)) for line in modern.shown().splitlines()) <= 70
    assert old.shown().isascii()
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Terminal("utf-8")
    print_chart(line_chart(), stream=plain)
    assert "\x1b" not in plain.shown()


def test_a_chart_is_saved_as_its_suffix_says(tmp_path: Path) -> None:
    save(line_chart(), tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text() == line_chart().svg()
    with pytest.raises(ConfigError, match=r"\.svg or \.png"):
        save(line_chart(), tmp_path / "a.jpg")
    with pytest.raises(ConfigError, match="cannot be written"):
        save(line_chart(), tmp_path / "none" / "a.svg")


@pytest.mark.parametrize("package", ["resvg_py", "ttf_opensans"])
def test_a_png_without_its_packages_is_one_sentence(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=r"pip install 'bankfull\[charts\]'"):
        save(line_chart(), tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


def test_a_png_is_not_drawn_without_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ttf_opensans.OPENSANS_SEMIBOLD, "path", tmp_path / "none.ttf")
    with pytest.raises(ConfigError, match="resvg and its font"):
        save(line_chart(), tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


def test_a_png_is_white_paper_of_twice_the_size(tmp_path: Path) -> None:
    save(line_chart(), tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and int.from_bytes(data[16:20], "big") == 2 * 760
    packed, at = b"", 8
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        packed += data[at + 8 : at + 8 + size] if data[at + 4 : at + 8] == b"IDAT" else b""
        at += 12 + size
    # No filter changes a picture's first pixel. With CSS variables, which resvg does not know, it would be black.
    assert zlib.decompress(packed)[1:5] == b"\xff\xff\xff\xff"


def test_every_text_of_a_chart_is_in_its_png_where_the_machine_has_no_fonts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def svg_to_bytes(**options: Any) -> bytes:
        given.update(options)
        return b""

    bare = partial(resvg_py.svg_to_bytes, skip_system_fonts=True)
    monkeypatch.setattr(resvg_py, "svg_to_bytes", svg_to_bytes)
    save(line_chart(), tmp_path / "a.png")
    svg, given["zoom"] = given["svg_string"], 1  # a quarter of the work
    whole = bare(**given)
    labels = re.findall(r"<text[^>]*>[^<]+</text>", svg)
    assert len(labels) == len(texts(parsed(line_chart()))) > 10
    for label in labels:
        assert bare(**{**given, "svg_string": svg.replace(label, "")}) != whole, label
