"""A budget is turned into pages, slots and rows before anything runs; what cannot work is said with the numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bankfull.config import SchedConfig, StateConfig
from bankfull.errors import ConfigError
from bankfull.ranks.page_share import PageShare
from bankfull.runtime.memory import Sizes, longest, plan_memory, shown
from bankfull.state.spec import Layout, Paged, Recurrent, Shared, TensorSpec, layout_of

KV = (TensorSpec("k", (2, 8), "float32"), TensorSpec("v", (2, 8), "float32"))
SSM = Recurrent((TensorSpec("ssm", (64, 4), "float32"),))
FULL = layout_of([(Paged(KV),)] * 4, 16)
MIXED = layout_of([(Paged(KV, 32),)] * 5 + [(Paged(KV),), (Shared(5),)], 16)
STATE = layout_of([(SSM,)] * 3, 16)
HYBRID = layout_of([(SSM,)] * 3 + [(Paged(KV),)], 16)


def plan(
    layout: Layout,
    memory: object,
    *,
    free: int = 1 << 30,
    rows: int = 4,
    max_len: int | None = None,
    page_ranks: int = 1,
) -> Sizes:
    config = StateConfig(memory=memory, snapshot_slots=2)  # type: ignore[arg-type]
    return plan_memory(
        layout,
        SchedConfig(rows=rows, step_tokens=64),
        config,
        free=free,
        depth=1,
        made_for=1000,
        max_len=max_len,
        page_ranks=page_ranks,
    )


@pytest.mark.parametrize("layout", (FULL, MIXED, STATE, HYBRID))
@given(memory=st.integers(1, 1 << 22), rows=st.integers(1, 8))
def test_what_is_planned_stays_within_the_budget_and_holds_one_sequence(layout: Layout, memory: int, rows: int) -> None:
    try:
        sizes = plan(layout, max(memory, 2), rows=rows)
    except ConfigError as error:
        assert "\n" not in str(error)
        return
    assert sizes.nbytes(layout) <= max(memory, 2)
    assert 1 <= sizes.rows <= rows and 1 <= sizes.max_len <= 1000
    assert layout.frames_for(sizes.max_len, 64) <= sizes.frames or not layout.paged
    if layout.recurrent:
        assert sizes.slots >= 3 * sizes.rows
    if sizes.max_len < 1000 or sizes.rows < rows:
        assert sizes.notices, "the sizes are smaller than configured, without a notice"


@given(memory=st.integers(1, 1 << 20), ranks=st.integers(1, 5))
def test_ranks_that_share_pages_hold_more_of_them_and_each_stays_within_its_budget(memory: int, ranks: int) -> None:
    try:
        sizes = plan(FULL, max(memory, 2), page_ranks=ranks)
    except ConfigError as error:
        assert "\n" not in str(error)
        return
    kept = PageShare(ranks, 0).frames(sizes.frames)
    assert (kept + 1) * FULL.frame_bytes <= max(memory, 2)
    assert sizes.max_len == 1000 or kept * ranks == sizes.frames, "the pages of every rank are used"
    assert FULL.frames_for(sizes.max_len, 64) <= sizes.frames


def test_a_context_that_is_too_long_for_one_rank_fits_on_two() -> None:
    least = (FULL.frames_for(1000, 64) + 1) // 2 + 1
    assert plan(FULL, least * FULL.frame_bytes, page_ranks=2, max_len=1000).max_len == 1000
    with pytest.raises(ConfigError, match=rf"needs {shown(least * FULL.frame_bytes)} of state"):
        plan(FULL, (least - 1) * FULL.frame_bytes, page_ranks=2, max_len=1000)


def test_a_fraction_is_taken_of_what_is_free() -> None:
    assert plan(FULL, 0.5, free=1 << 20).nbytes(FULL) <= 1 << 19 < plan(FULL, 0.9, free=1 << 20).nbytes(FULL)


def test_automatic_never_takes_more_than_could_be_used() -> None:
    sizes = plan(FULL, None, free=1 << 40)
    assert sizes.frames == 4 * FULL.frames_for(1000, 64) and not sizes.notices


def test_a_context_that_was_asked_for_is_never_shortened() -> None:
    with pytest.raises(ConfigError, match=r"1000 tokens .* lower max_model_len to \d+"):
        plan(FULL, 1 << 18, max_len=1000)
    assert plan(FULL, 1 << 18).max_len < 1000


@pytest.mark.parametrize("layout", (FULL, MIXED))
@given(frames=st.integers(0, 200))
def test_longest_is_the_longest(layout: Layout, frames: int) -> None:
    found = longest(layout, frames, 1000, 64)
    assert layout.frames_for(found, 64) <= frames
    assert found == 1000 or layout.frames_for(found + 1, 64) > frames


def test_more_than_is_free_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"2\.0 GiB.*1\.0 GiB"):
        plan(FULL, "2GiB")


def test_sizes_are_shown_in_the_unit_that_fits() -> None:
    assert [shown(n) for n in (5, 2048, 3 << 20, 5 << 30)] == ["5 B", "2.0 KiB", "3.0 MiB", "5.0 GiB"]
