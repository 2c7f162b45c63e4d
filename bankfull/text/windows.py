"""Split a long text into parts that are tokenized one by one, which bounds the time and memory of each call. The ids of
the parts, concatenated, are the ids of the whole (`spans`). A text that cannot be cut is one part.
"""

from __future__ import annotations

from collections.abc import Iterator

from bankfull.text.spans import Spans

WINDOW = 1 << 15
"""Characters of a part, up to the next position where the text may be cut."""


def windows(text: str, spans: Spans) -> Iterator[str]:
    """The parts, from the beginning."""
    start = 0
    while (cut := spans.next_cut(text, start + WINDOW, len(text))) is not None:
        yield text[start:cut]
        start = cut
    yield text[start:]


def last_windows(text: str, spans: Spans) -> Iterator[str]:
    """The parts, from the end."""
    end = len(text)
    while end:
        start: int | None = None
        searched = end
        while start is None and searched > WINDOW:
            searched, behind = searched - WINDOW, searched
            start = spans.next_cut(text, searched, behind)
        yield text[start or 0 : end]
        end = start or 0
