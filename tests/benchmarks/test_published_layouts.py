"""Published figures beside predictions: the tables of docs/parallel.md are those that the benchmark computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.published_layouts import (
    CHUNKED,
    WHOLE,
    separation_example,
    separation_table,
    series_table,
    tensor_parallel_series,
)

PAGE = (Path(__file__).parent.parent.parent / "docs" / "parallel.md").read_text()


def test_the_tensor_parallel_series_is_predicted_and_the_page_shows_it() -> None:
    rows = tensor_parallel_series()
    assert series_table(rows) in PAGE
    for row in rows:
        assert row.published < row.limit and row.assumed < row.limit and row.fitted < row.limit
        assert row.fitted == pytest.approx(row.published, rel=0.1)
        assert row.assumed == pytest.approx(row.published, rel=0.4)
    assert [row.assumed for row in rows] == sorted(row.assumed for row in rows)


def test_separated_engines_beat_whole_prompts_on_one_device() -> None:
    rows = {row.engines: row.predicted for row in separation_example(40, precision=0.2)}
    assert rows["prefill=2,decode=1"] > rows[WHOLE] and rows[CHUNKED] > rows[WHOLE]
    assert rows["decode alone"] > rows["prefill alone"] > rows[WHOLE]


@pytest.mark.full
def test_the_page_shows_the_separation_that_is_predicted() -> None:
    assert separation_table(separation_example(200)) in PAGE
