"""docs/figures.toml holds each measured figure once; pages show it unchanged."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from docs.commands import fault_of_words
from docs.figures import BLOCK, ROOT, TABLES, Figures, FiguresError, Source, load, texts

MEASURED = re.compile(
    r"\b\d[\d,.]*\s?(?:k\s)?(?:(?:output\s)?tok(?:en)?s?/s|[GT]B/s|[GT]FLOP/s)|\b\d+\.\d+x\b|\b\d+\s(?:of\sits\s)?tests?\s(?:passed|failed)"
)
TESTS = re.compile(r"\b\d[\d,]*\s(?:of\sits\s)?tests\s(?:passed|failed)|tests\s.{0,40}await\sa\sdevice")
DISTINCT = re.compile(r"\d \.\. \d|\d\.\d+x \(")
"""Cells that cannot be equal by chance: ranges, and ratios with their quartiles."""
SET = """
[machine]
here = "a machine"
[speed]
command = "measure"
date = 2026-01-31
machine = "here"
[speed.columns]
work = "{label}"
rate = "{rate:.1f}"
[speed.row]
one = { label = "one", rate = 2.25 }
two = { label = "two" }
[view]
told = "{speed.one.rate:.1f} on {speed.machine}, {speed.date}"
wrong = "{speed.three.rate}"
[empty]
"""


def source_of(tmp_path: Path, text: str) -> Source:
    path = tmp_path / "figures.toml"
    path.write_text(text)
    return load(path)


def outside(text: str) -> str:
    return BLOCK.sub("", text)


def names() -> list[Path]:
    return list(texts())


@pytest.mark.parametrize("path", names(), ids=lambda path: path.name)
def test_every_block_is_as_the_figures_are(path: Path) -> None:
    text = path.read_text()
    assert load().filled(text) == text, f"{path.name} differs from docs/figures.toml: run `make figures`"


def test_every_set_of_figures_and_every_view_is_shown() -> None:
    source = load()
    shown = {found[1] for path in texts() for found in BLOCK.findall(path.read_text())}
    assert shown == {*source.sets, *source.views, *TABLES}


@pytest.mark.parametrize("path", names(), ids=lambda path: path.name)
def test_a_figure_of_a_block_is_not_quoted_elsewhere(path: Path) -> None:
    text = outside(path.read_text())
    for figures in load().sets.values():
        for row in figures.rows.values():
            for cell in figures.cells(row):
                assert not DISTINCT.search(cell) or cell not in text, f"{path.name} repeats {cell} of {figures.name}"
    found = TESTS.search(text)
    assert found is None, f"{path.name} counts tests outside of a block: {found[0] if found else ''}"


def test_the_readme_has_measured_figures_in_blocks_alone() -> None:
    found = MEASURED.search(outside((ROOT / "README.md").read_text()))
    assert found is None, (
        f"README.md has {found[0] if found else ''!r} outside of a block: move it to docs/figures.toml"
    )


@pytest.mark.parametrize("told", ["12 tokens/s", "1,200 output tokens/s", "3.2x", "4.3 TB/s", "7 of its tests passed"])
def test_what_is_measured_is_recognized(told: str) -> None:
    assert MEASURED.search(f"and {told}.")


def test_a_table_names_its_origin(tmp_path: Path) -> None:
    source = source_of(tmp_path, SET.replace("[empty]", ""))
    text = "a\n<!-- figures: speed -->before<!-- /figures -->\nb <!-- figures: told --><!-- /figures -->"
    filled = source.filled(text)
    assert (
        "`measure`, 2026-01-31, here (a machine):" in filled and "| one | 2.2 |" in filled and "| two | - |" in filled
    )
    assert "before" not in filled and "told -->2.2 on a machine, 2026-01-31<!--" in filled
    assert source.filled(filled) == filled, "filling twice changes nothing"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<!-- figures: none --><!-- /figures -->", "no view 'none'"),
        ("<!-- figures: wrong --><!-- /figures -->", "speed.three.rate"),
        ("<!-- figures: speed -->", "no end"),
    ],
)
def test_a_block_that_cannot_be_written_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(FiguresError, match=said):
        source_of(tmp_path, SET.replace("[empty]", "")).filled(text)


def test_figures_without_their_origin_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FiguresError, match="empty lacks columns, command, date, machine, row"):
        source_of(tmp_path, SET)
    with pytest.raises(FiguresError, match="speed needs a date"):
        source_of(tmp_path, SET.replace("2026-01-31", '"today"').replace("[empty]", ""))


@pytest.mark.parametrize("figures", load().sets.values(), ids=lambda figures: figures.name)
def test_the_command_of_a_set_exists_and_has_its_options(
    figures: Figures, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(figures.command)
    assert words[0] in ("bankfull", "make", "python"), f"{figures.command!r} is no command of the project"
    assert fault_of_words(words, complete=True) is None
    if words[:2] != ["python", "-m"]:
        return
    monkeypatch.setattr(sys, "argv", [words[2], "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(words[2], run_name="__main__", alter_sys=True)
    assert not ended.value.code
    told = capsys.readouterr().out
    assert [word for word in words[3:] if word.startswith("--") and word not in told] == []
