"""Pages over context ranks: copies and moves have the same effect as in one pool."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bankfull.ops import move_tokens
from bankfull.runtime.spread_storage import SpreadStorage
from bankfull.state.spec import Paged, TensorSpec, layout_of
from bankfull.state.storage import Storage
from bankfull.types import Tier, TierAddress, Transfer
from tests.parallel.threads import ThreadRank, on_ranks
from tests.quick import examples

PAGE, PAGES = 4, 11
SPECS = Paged((TensorSpec("k", (3,), "float32"), TensorSpec("v", (5,), "int8")))
LAYOUT = layout_of([(SPECS,), (SPECS,)], PAGE)
CONTENT = torch.randint(0, 256, (PAGES + 1, LAYOUT.frame_bytes), generator=torch.Generator().manual_seed(1))
PLACES = st.integers(1, PAGES)


def filled(rank: ThreadRank) -> SpreadStorage:
    storage = SpreadStorage(LAYOUT, PAGES, 0, torch.device("cpu"), rank)
    for page in range(1, PAGES + 1):
        if storage.share.owns(page):
            storage.frames[storage.share.frame(page)] = CONTENT[page].to(torch.uint8)
    return storage


def whole() -> Storage:
    storage = Storage(LAYOUT, PAGES, 0, torch.device("cpu"))
    storage.frames.copy_(CONTENT.to(torch.uint8))
    return storage


def assert_equal(parts: list[SpreadStorage], expected: Tensor) -> None:
    for page in range(1, PAGES + 1):
        (own,) = [one for one in parts if one.share.owns(page)]
        assert torch.equal(own.frames[own.share.frame(page)], expected[page]), f"page {page}"


@examples(40, deadline=None)
@given(ranks=st.integers(1, 4), pairs=st.lists(st.tuples(PLACES, PLACES), max_size=6))
def test_pages_are_copied_in_order_whoever_has_them(ranks: int, pairs: list[tuple[int, int]]) -> None:
    transfers = [
        Transfer(i, TierAddress(Tier.DEVICE, src), TierAddress(Tier.DEVICE, dst)) for i, (src, dst) in enumerate(pairs)
    ]
    expected = whole()
    expected.transfer(transfers)

    def work(rank: ThreadRank) -> SpreadStorage:
        storage = filled(rank)
        storage.transfer(transfers)
        return storage

    assert_equal(on_ranks(ranks, work), expected.frames)


@examples(40, deadline=None)
@given(ranks=st.integers(1, 4), seed=st.integers(0, 1 << 20), rows=st.integers(1, 3), moves=st.integers(1, 5))
def test_accepted_drafts_move_whoever_has_them(ranks: int, seed: int, rows: int, moves: int) -> None:
    """Each row has pages of its own; tokens move towards smaller positions, and slot 0 pads."""
    draw = torch.Generator().manual_seed(seed)
    table = (torch.randperm(PAGES, generator=draw)[: rows * 3] + 1).view(rows, 3)
    at = torch.stack([torch.randperm(3 * PAGE - 1, generator=draw)[:moves].sort().values for _ in range(rows)])
    to = torch.arange(moves).expand(rows, -1)
    at = torch.maximum(at, to)
    source, target = (table.gather(1, place // PAGE) * PAGE + place % PAGE for place in (at, to))
    padded = torch.rand(rows, 1, generator=draw) < torch.arange(1, moves + 1) / (2 * moves)
    source, target = source.masked_fill(padded, 0), target.masked_fill(padded, 0)
    expected = whole()
    (segments,) = expected.segments
    move_tokens.body(expected.frames, segments, PAGE, source, target)

    def work(rank: ThreadRank) -> SpreadStorage:
        storage = filled(rank)
        storage.move(segments, PAGE, source, target)
        return storage

    assert_equal(on_ranks(ranks, work), expected.frames)


def test_each_rank_has_its_share_of_the_frames() -> None:
    for storage in on_ranks(3, filled):
        assert len(storage.frames) == 1 + 4  # 11 pages


def test_a_poisoned_page_is_poisoned_where_it_is() -> None:
    def work(rank: ThreadRank) -> SpreadStorage:
        storage = filled(rank)
        storage.poison([5])
        return storage

    expected = whole()
    expected.poison([5])
    assert_equal(on_ranks(2, work), expected.frames)
