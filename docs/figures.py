"""Writes the measured figures of docs/figures.toml into README.md and docs/*.md: `make figures`.

A page marks a block with `<!-- figures: NAME -->` and `<!-- /figures -->`; only this program writes between the two.
NAME is a set of figures, which becomes a table with its command, date and machine, or a view: a text in which
{SET.ROW.FIELD} or {SET.ROW.FIELD:FORMAT} is a figure, {SET.*.FIELD} the sum over all rows, and {SET.date},
{SET.machine}, {SET.on} (the machine's name) or {SET.command} the origin. Blocks named in TABLES are written from the
package's own declarations.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from textwrap import wrap
from typing import Any

from bankfull.combinations import every_declaration
from bankfull.config import SchedConfig
from bankfull.sched.policies import policy_of
from bankfull.scheduling import POLICIES, readers
from bankfull.speculation import option_rows
from bankfull.weights.formats import SCHEMES
from bankfull.weights.quantize import TYPES
from bankfull.weights.scheme import Scheme

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "docs" / "figures.toml"
BLOCK = re.compile(r"(<!-- figures: ([\w-]+) -->)(.*?)(<!-- /figures -->)", re.DOTALL)
REFERENCE = re.compile(r"\{([\w-]+)\.([\w*.-]+)(?::([^{}]+))?\}")
NOTHING = "-"
WIDTH = 120

Row = Mapping[str, Any]


class FiguresError(Exception):
    """One sentence that describes an error in figures.toml or in a page."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One set: the results of one command on one machine."""

    name: str
    command: str
    date: date
    on: str
    """The machine's name in figures.toml."""
    machine: str
    columns: Mapping[str, str]
    """Heading -> format of its cells, with a row's fields in braces."""
    rows: Mapping[str, Row]
    note: str = ""

    def cells(self, row: Row) -> list[str]:
        return [_cell(form, row) for form in self.columns.values()]

    def table(self) -> str:
        origin = f"`{self.command}`, {self.date}, {self.on} ({self.machine}){f'; {self.note}' if self.note else ''}:"
        lines = [*wrap(origin, WIDTH, break_long_words=False, break_on_hyphens=False), ""]
        lines += [_line(list(self.columns)), "|" + "---|" * len(self.columns)]
        return "\n".join([*lines, *(_line(self.cells(row)) for row in self.rows.values())])

    def value(self, path: str) -> Any:
        """`date`, `on`, `machine`, `command`, ROW.FIELD, or *.FIELD for the sum."""
        if path in ("date", "on", "machine", "command"):
            return getattr(self, path)
        row, _, field = path.partition(".")
        rows = list(self.rows.values()) if row == "*" else [self.rows[row]] if row in self.rows else []
        if not rows or any(field not in each for each in rows):
            raise FiguresError(f"{{{self.name}.{path}}} names no figure of {SOURCE.name}.")
        return sum(each[field] for each in rows) if row == "*" else rows[0][field]


@dataclass(frozen=True, slots=True)
class Source:
    sets: Mapping[str, Figures]
    views: Mapping[str, str]

    def block(self, name: str) -> str:
        """The text between the markers; a table has lines of its own."""
        if name in self.sets:
            return f"\n{self.sets[name].table()}\n"
        if name in TABLES:
            return f"\n{TABLES[name]()}\n"
        if name not in self.views:
            raise FiguresError(f"{SOURCE.name} has no figures and no view {name!r}.")
        text = REFERENCE.sub(self._written, self.views[name])
        return f"\n{text.strip()}\n" if "\n" in text.strip() else text.strip()

    def _written(self, found: re.Match[str]) -> str:
        name, path, form = found.groups()
        if name not in self.sets:
            raise FiguresError(f"{found[0]} names no set of figures of {SOURCE.name}.")
        return format(self.sets[name].value(path), form or "")

    def filled(self, text: str) -> str:
        """The page with every block up to date."""
        blocks = len(BLOCK.findall(text))
        if (text.count("<!-- figures:"), text.count("<!-- /figures -->")) != (blocks, blocks):
            raise FiguresError("A block of figures has no end, or no beginning.")
        return BLOCK.sub(lambda found: f"{found[1]}{self.block(found[2])}{found[4]}", text)


def load(path: Path = SOURCE) -> Source:
    document = tomllib.loads(path.read_text())
    machines, views = document.pop("machine"), document.pop("view", {})
    sets = {}
    for name, raw in document.items():
        missing = {"command", "date", "machine", "columns", "row"} - raw.keys()
        if missing or type(raw["date"]) is not date or raw["machine"] not in machines:
            known = "needs a date without quotes and a known machine"
            what = f"lacks {', '.join(sorted(missing))}" if missing else known
            raise FiguresError(f"{path.name}: {name} {what}.")
        sets[name] = Figures(
            name,
            raw["command"],
            raw["date"],
            raw["machine"],
            machines[raw["machine"]],
            raw["columns"],
            raw["row"],
            raw.get("note", ""),
        )
    return Source(sets, views)


def texts() -> Iterator[Path]:
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").glob("*.md"))


def main() -> None:
    source = load()
    for path in texts():
        before = path.read_text()
        try:
            after = source.filled(before)
        except FiguresError as error:
            sys.exit(f"{path.relative_to(ROOT)}: {error}")
        if after != before:
            path.write_text(after)
            print(f"{path.relative_to(ROOT)}: new figures")


def speculative_options() -> str:
    rows = [_line([f"`{way}`", options]) for way, options in option_rows()]
    return "\n".join([_line(["way", "options with their usual values"]), "|---|---|", *rows])


def policies() -> str:
    """Scheduling policies: their order, whether running sequences give way, and the options that only some read."""
    told = {option: f"`--{option.replace('_', '-')}`" for option, _, _ in readers()}
    rows = [
        _line(
            [
                f"`{name}`",
                way.about,
                "yes" if policy_of(SchedConfig(policy=name)).preemptive else "no",
                ", ".join(told[option] for option in way.reads) or NOTHING,
            ]
        )
        for name, way in POLICIES.items()
    ]
    return "\n".join([_line(["`--policy`", "order", "preempts", "reads"]), "|---|---|---|---|", *rows])


def combinations() -> str:
    """What each value of an option needs and refuses; values that declare the same share a row."""
    alike: dict[tuple[str, str], list[str]] = {}
    for asked, declared in every_declaration():
        needs, refuses = (
            ", ".join(trait.value for trait in traits) or NOTHING for traits in (declared.needs, declared.refuses)
        )
        alike.setdefault((needs, refuses), []).append(f"`{asked}`")
    rows = [_line([", ".join(asked), *told]) for told, asked in alike.items()]
    return "\n".join([_line(["option", "needs", "is not for"]), "|---|---|---|", *rows])


def weight_types() -> str:
    """What matrices can be rounded to at load; types that differ in the width of their groups share a row."""
    alike: dict[str, list[Scheme]] = {}
    for name in TYPES:
        if about := SCHEMES[name].about:
            alike.setdefault(about, []).append(SCHEMES[name])
    rows = [
        _line([", ".join(f"`{one.name}`" for one in many), ", ".join(f"{one.bits:.4g}" for one in many), about])
        for about, many in alike.items()
    ]
    return "\n".join([_line(["`--quantize`", "bits per weight", "stored as"]), "|---|---|---|", *rows])


TABLES: Mapping[str, Callable[[], str]] = {
    "combinations": combinations,
    "policies": policies,
    "speculative-options": speculative_options,
    "weight-types": weight_types,
}


def _cell(form: str, row: Row) -> str:
    """`-` if the row lacks a field of the cell."""
    try:
        return form.format(**row)
    except KeyError:
        return NOTHING


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
