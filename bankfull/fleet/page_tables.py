"""The page tables of running sequences, for people to look at: which pages each holds, and which of them it shares."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from bankfull.types import NULL

if TYPE_CHECKING:
    from bankfull.sched.scheduler import Scheduler

MOST_SEQUENCES = 64
MOST_PAGES = 512
"""Sequences, and pages of each table, that are shown; the engine's loop collects them between two steps."""


class SequencePages(msgspec.Struct, array_like=True):
    request: str
    sample: int
    tenant: str
    computed: int
    """Tokens whose state the pages hold."""
    tables: list[list[int]]
    """One for each group of layers, cut after MOST_PAGES; 0 where a window has passed."""


class PageTables(msgspec.Struct, array_like=True):
    page_tokens: list[int]
    """Tokens per page of each group."""
    free: int
    cached: int
    held: int
    quarantined: int
    sequences: list[SequencePages]
    """The first MOST_SEQUENCES by row."""
    running: int
    """All running sequences."""
    references: dict[int, int]
    """References to the pages in `sequences` that are held more than once: by sequences, pins and copies under way."""


def page_tables_of(scheduler: Scheduler) -> PageTables:
    state = scheduler.state
    shown = [
        SequencePages(
            str(seq.request.id),
            seq.child,
            seq.request.tenant,
            seq.computed,
            [table[:MOST_PAGES] for table in seq.state.tables],
        )
        for seq in sorted(scheduler.facts.running, key=lambda seq: seq.row)[:MOST_SEQUENCES]
        if seq.state is not None
    ]
    census = state.pages.census()
    pages = {page for seq in shown for table in seq.tables for page in table if page != NULL}
    return PageTables(
        [group.page_tokens for group in state.layout.paged],
        census.free,
        census.cached,
        census.held,
        census.quarantined,
        shown,
        scheduler.running,
        {page: count for page in sorted(pages) if (count := state.pages.references(page)) > 1},
    )
