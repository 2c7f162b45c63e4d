"""Page tables as they are shown: those of the running sequences, with what they share."""

from __future__ import annotations

from bankfull.fleet.page_tables import MOST_PAGES, MOST_SEQUENCES, page_tables_of
from tests.sched.driver import drain, request, scheduler, step


def test_samples_share_full_pages_and_copy_the_last_one_on_write() -> None:
    sched = scheduler(frames=40)
    sched.add(request(1, 11, 20, samples=2))
    for _ in range(4):
        step(sched)
    shown = page_tables_of(sched)
    first, second = shown.sequences
    assert (first.request, first.sample, second.sample) == ("1", 0, 1) and shown.page_tokens == [4]
    one, other = first.tables[0], second.tables[0]
    assert one[:2] == other[:2] and one[2] != other[2]
    assert [shown.references.get(page, 1) for page in one[:3]] == [2, 2, 1]
    assert shown.free + shown.cached + shown.held + shown.quarantined == 40
    drain(sched)
    assert not page_tables_of(sched).sequences


def test_what_is_shown_is_bounded() -> None:
    sched = scheduler(frames=20_000, rows=100, step_tokens=100_000)
    sched.add(request(1, 4 * MOST_PAGES + 100, 5))
    for id in range(2, 90):
        sched.add(request(id, 3, 5))
    step(sched)
    shown = page_tables_of(sched)
    assert shown.running == 89 and len(shown.sequences) == MOST_SEQUENCES
    assert max(len(table) for one in shown.sequences for table in one.tables) == MOST_PAGES
