"""The page that refusals name lists every family."""

from __future__ import annotations

from pathlib import Path

from bankfull.models.registry import FAMILIES


def test_the_page_of_architectures_lists_every_family() -> None:
    page = (Path(__file__).parents[2] / "docs" / "architectures.md").read_text()
    assert [name for name in FAMILIES if f"`{name}`" not in page] == []
