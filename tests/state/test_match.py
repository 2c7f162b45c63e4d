from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bankfull.config import StateConfig
from bankfull.state.manager import StateManager
from bankfull.state.prefix import Chain
from bankfull.state.spec import Paged, Recurrent, StateSpec, TensorSpec, layout_of

HEAVY = (TensorSpec("k", (8,), "float32"),)
LIGHT = (TensorSpec("k", (4,), "float32"),)
SPECS: list[StateSpec] = [Paged(HEAVY), Paged(LIGHT, window=5), Recurrent(HEAVY)]


@given(
    kinds=st.sets(st.integers(0, 2), min_size=1),
    pages=st.sets(st.tuples(st.integers(0, 1), st.integers(1, 12))),
    snapshots=st.sets(st.integers(1, 12)),
    limit=st.integers(0, 24),
)
def test_a_match_is_the_longest_prefix_whose_state_is_there_in_every_group(
    kinds: set[int], pages: set[tuple[int, int]], snapshots: set[int], limit: int
) -> None:
    layout = layout_of([(SPECS[kind],) for kind in sorted(kinds)], 2)
    manager = StateManager(layout, 40, 40, StateConfig(snapshot_every=1))
    tokens = list(range(24))
    chain = Chain(b"", 2)
    chain.extend(tokens, len(tokens))
    for g, index in pages:
        if g < len(layout.paged) and index * layout.paged[g].page_tokens <= 24:
            [page] = manager.pages.take(1) or []
            manager.pages.publish(page, (g, chain.name(index * layout.paged[g].page_tokens)))
    longest = max((g.page_tokens for g in layout.paged), default=2)
    for index in snapshots if layout.recurrent else ():
        if index * longest <= 24:
            [slot] = manager.slots.take(1) or []
            manager.slots.publish(slot, ("slot", chain.name(index * longest)))

    def there(length: int) -> bool:
        if layout.recurrent and manager.slots.find(("slot", chain.name(length))) is None:
            return False
        for g, group in enumerate(layout.paged):
            first = 0 if group.window is None else max(0, length - group.window + 1)
            for position in range(first, length):
                end = (position // group.page_tokens + 1) * group.page_tokens
                if end > length or manager.pages.find((g, chain.name(end))) is None:
                    return False
        return True

    expected = max((length for length in range(longest, limit + 1, longest) if there(length)), default=0)
    match = manager.match(Chain(b"", 2), tokens, limit)
    assert match.length == expected
    if expected:
        for table, group in zip(match.tables, layout.paged, strict=True):
            assert len(table) == expected // group.page_tokens
        assert bool(match.slot) == bool(layout.recurrent)
