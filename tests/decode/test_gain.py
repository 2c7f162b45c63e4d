"""The widths of a step are those with the highest expected rate."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bankfull.decode.gain import LIFETIME, StepCosts, best_widths
from tests.quick import examples


def costs_of(seconds: list[float]) -> StepCosts:
    """`seconds[i]`: of a step of i + 1 tokens."""
    costs = StepCosts()
    for tokens, time in enumerate(seconds, 1):
        costs.observe(tokens, time)
    return costs


@given(
    st.lists(st.lists(st.floats(0.05, 1.0), min_size=3, max_size=3), min_size=1, max_size=3),
    st.lists(st.floats(0.5, 2.0), min_size=13, max_size=13),
    st.integers(0, 9),
)
@examples(200)
def test_no_other_widths_give_more_tokens_per_second(
    accepted: list[list[float]], growth: list[float], spare: int
) -> None:
    chances = np.cumprod(accepted, axis=1)
    rows, width = chances.shape
    seconds = np.cumsum(growth)
    costs = costs_of(seconds.tolist())

    def rate(widths: tuple[int, ...]) -> float:
        expected = rows + sum(chances[i, :w].sum() for i, w in enumerate(widths))
        return float(expected / seconds[rows + sum(widths) - 1])

    able = [w for w in itertools.product(range(width + 1), repeat=rows) if sum(w) <= spare]
    found = tuple(best_widths(chances.tolist(), rows, costs, 1.0, spare))
    assert found in able
    usual = {w: rate(w) for w in able if all(chances[i, :x].min(initial=1) > 0.02 for i, x in enumerate(w))}
    assert rate(found) == pytest.approx(max(usual.values()))


def test_drafts_that_gain_too_little_are_not_verified() -> None:
    chances = [[0.5, 0.25]]
    costs = costs_of([1.0, 1.4, 2.0])  # one draft: 1.5 tokens in 1.4 seconds, a gain of 1.07
    assert best_widths(chances, 1, costs, 1.05, 8) == [1]
    assert best_widths(chances, 1, costs, 1.10, 8) == [0]
    assert best_widths(chances, 1, StepCosts(), 1.0, 8) == [0], "nothing was measured yet"
    assert best_widths([[0.0] * 3, []], 2, costs, 1.0, 8) == [0, 0]


def test_times_are_medians_between_sizes_interpolated_and_beyond_them_assumed() -> None:
    costs = StepCosts()
    for seconds in (1.0, 9.0, 1.1, 0.9, 1.0):
        costs.observe(1, seconds)
    costs.observe(5, 2.0)
    costs.observe(3, 0.0)  # a clock that stands still says nothing
    assert [costs.seconds(tokens) for tokens in (1, 3, 5)] == [1.0, 1.5, 2.0]
    assert 2.0 < (costs.seconds(10) or 0) < 3.0


def test_a_size_that_was_slow_once_is_forgotten_and_tried_again() -> None:
    costs = costs_of([1.0])
    costs.observe(4, 50.0)
    assert best_widths([[0.9, 0.8, 0.7]], 1, costs, 1.0, 8) == [0]
    for _ in range(2 * LIFETIME):
        costs.observe(1, 1.0)
    assert best_widths([[0.9, 0.8, 0.7]], 1, costs, 1.0, 8) == [3]
