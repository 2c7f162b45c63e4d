"""What the structure of the package promises: names have one meaning, files one job, folders say what they hold."""

from __future__ import annotations

import ast

from tests.structure import modules, repeated_class_names

SOURCES = modules()


def test_a_class_name_has_one_meaning() -> None:
    assert repeated_class_names(SOURCES) == {}


def test_every_package_says_what_it_holds() -> None:
    silent = [name for name, text in SOURCES.items() if name.endswith("__init__.py") and not _docstring(text)]
    assert silent == []


def test_the_formatter_alone_lays_out_code() -> None:
    assert [name for name, text in SOURCES.items() if "# fmt:" in text] == []


def _docstring(text: str) -> str | None:
    return ast.get_docstring(ast.parse(text))
