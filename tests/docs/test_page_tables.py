"""The picture of shared pages is what the scheduler does today."""

from __future__ import annotations

from docs.page_tables import PICTURE, drawn, live_tables


def test_the_picture_is_drawn_from_the_page_tables_of_today() -> None:
    assert PICTURE.read_text() == drawn(live_tables()), "run `python -m docs.page_tables`"


def test_the_picture_shows_sharing_between_requests_and_a_page_that_was_copied() -> None:
    tables = live_tables()
    first, second, other = (one.tables[0] for one in tables.sequences)
    assert first[:2] == second[:2] == other[:2], "the system prompt"
    assert all(tables.references[page] == 3 for page in first[:2])
    assert first[2] != second[2] != other[2], "each sample writes to a copy of its own"
