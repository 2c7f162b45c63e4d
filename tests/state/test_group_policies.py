from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bankfull.state.policy import Full, Snapshots, Window

PAGES = st.integers(1, 4)
HITS = st.sets(st.integers(1, 24))
LENGTHS = st.integers(0, 60)


def seen(position: int, window: int | None) -> range:
    """The positions that the token at `position` can see before itself, from the definition."""
    return range(0 if window is None else max(0, position - window + 1), position)


def brute_force(page: int, window: int | None, hits: set[int], length: int) -> int:
    """The longest border at which every earlier position that the next token attends to is in a cached page."""
    borders = range(0, length + 1, page)
    return max(b for b in borders if all(p // page + 1 in hits for p in seen(b, window)))


@given(PAGES, HITS, LENGTHS)
def test_full_attention_reuses_exactly_what_the_definition_allows(page: int, hits: set[int], length: int) -> None:
    assert Full(page).reusable(lambda end: end // page in hits, length) == brute_force(page, None, hits, length)


@given(PAGES, st.integers(1, 20), HITS, LENGTHS)
def test_a_window_reuses_exactly_what_the_definition_allows(
    page: int, window: int, hits: set[int], length: int
) -> None:
    found = Window(page, window).reusable(lambda end: end // page in hits, length)
    assert found == brute_force(page, window, hits, length)


@given(PAGES, st.integers(1, 20), st.integers(0, 100))
def test_a_window_forgets_a_page_as_soon_as_no_later_token_sees_it_and_not_before(
    page: int, window: int, position: int
) -> None:
    first = Window(page, window).first_live(position)
    oldest = min(seen(position, window), default=position)
    assert first == oldest // page


@given(st.integers(1, 4), st.integers(1, 4), HITS, LENGTHS)
def test_a_snapshot_is_reused_only_where_it_was_taken(block: int, every: int, hits: set[int], length: int) -> None:
    borders = {hit * block for hit in hits}
    found = Snapshots(block, every).reusable(lambda end: end in borders, length)
    assert found == max((b for b in borders if b <= length), default=0)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 60), st.integers(1, 30))
def test_chunks_that_are_cut_stop_at_every_snapshot_that_is_wanted(
    block: int, every: int, prompt_len: int, chunk: int
) -> None:
    policy = Snapshots(block, every)
    position, stops = 0, set()
    while position < prompt_len:
        size = policy.cut(position, min(chunk, prompt_len - position), prompt_len)
        assert 1 <= size <= chunk
        position += size
        stops.add(position)
    wanted = {p for p in range(1, prompt_len + 1) if policy.wanted(p, prompt_len)}
    assert wanted <= stops
    last = (prompt_len - 1) // block * block
    assert wanted == {*range(block * every, prompt_len + 1, block * every), *([last] if last else [])}
