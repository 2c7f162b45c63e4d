"""What may be combined with what: every pair of values of two dimensions is offered to the loader, with all else at its
default, and the answer is shown as a table. docs/combinations.md has it between two marks; nobody edits it by hand."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

from tests.trial.case import Case
from tests.trial.dimensions import OPTIONS
from tests.trial.models import KINDS
from tests.trial.outcome import Refused
from tests.trial.run_engine import loading
from tests.trial.setup import setup_of

PAGE = Path(__file__).parents[2] / "docs" / "combinations.md"
BEGIN, END = "<!-- combinations: begin -->", "<!-- combinations: end -->"
COLUMNS = ("strategy", "kv_dtype", "kv_evict", "quantize")
"""Dimensions whose values meet every kind of model. Their pairs with each other are tried on the first kind."""
OTHERS = ("tiers", "prefix_cache", "batching", "policy", "pool", "depth", "captured", "providers")
"""Dimensions whose values refuse nothing among the kinds, and are named below the table where they do. Formats of files
are left out: with each of them `quantize` is refused, and nothing else is."""
SEED = 4
"""Of the widths of drafters."""
Pair = tuple[str, str, Any, str, Any]
"""A model, and two options with their values."""


def refusal(model: str, options: dict[str, Any]) -> str:
    """Why an engine with these options is refused; empty if it starts."""
    case = Case(SEED, model, options)
    setup = setup_of(case)
    try:
        with loading(setup, [[1, 2, 3]]) as load:
            load()
    except (Refused, ValueError) as error:
        return str(error)
    return ""


def rare_values() -> Iterator[tuple[str, Any]]:
    for name in COLUMNS:
        for value in OPTIONS[name].values:
            if value != OPTIONS[name].usual:
                yield name, value


def pairs() -> list[Pair]:
    """Pairs of options on the first kind of model."""
    model = next(iter(KINDS))
    named = [(name, value) for name in (*COLUMNS, *OTHERS) for value in OPTIONS[name].values]
    rare = [(name, value) for name, value in named if value != OPTIONS[name].usual]
    return [(model, a, x, b, y) for (a, x), (b, y) in combinations(rare, 2) if a != b]


def cell(model: str, name: str, value: Any) -> str:
    return "no" if refusal(model, {name: value}) else "yes"


def shown(name: str, value: Any) -> str:
    return str(value).lower() if name == "strategy" else f"{name.removeprefix('kv_')} {str(value).lower()}"


def table() -> list[str]:
    columns = list(rare_values())
    lines = [
        "| | " + " | ".join(shown(*column) for column in columns) + " |",
        "|---" * (1 + len(columns)) + "|",
    ]
    alike: dict[tuple[str, ...], list[str]] = {}
    for model, kind in KINDS.items():
        alike.setdefault(tuple(cell(model, *column) for column in columns), []).append(kind)
    lines += [f"| {', '.join(kinds)} | " + " | ".join(cells) + " |" for cells, kinds in alike.items()]
    refused = [f"`{a}={x}` with `{b}={y}`" for model, a, x, b, y in pairs() if _only_together(model, a, x, b, y)]
    told = f"Of {len(pairs())} pairs of options of {next(iter(KINDS.values()))}, these are refused although each "
    told += "option is possible alone: " + ("; ".join(refused) or "none") + "."
    lines += ["", *textwrap.wrap(told, 118, break_long_words=False, break_on_hyphens=False)]
    return lines


def _only_together(model: str, a: str, x: Any, b: str, y: Any) -> bool:
    return bool(refusal(model, {a: x, b: y})) and not refusal(model, {a: x}) and not refusal(model, {b: y})


def on_the_page() -> list[str]:
    text = PAGE.read_text()
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip().splitlines()


def write() -> None:
    text = PAGE.read_text()
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    PAGE.write_text(text[:begin] + "\n" + "\n".join(table()) + "\n" + text[end:])
