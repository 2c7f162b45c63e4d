"""The choice that a quick run makes loses no meeting of values."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.quick import covering

pytest_plugins = ["pytester"]


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_whatever_meets_in_any_row_meets_in_a_chosen_one(strength: int) -> None:
    rows = [row for row in product(range(4), range(3), range(2), range(3)) if row[0] != row[1]]
    chosen = covering(rows, strength)

    def meetings(of: list[tuple[int, ...]]) -> set[object]:
        return {pair for row in of for pair in combinations(enumerate(row), strength)}

    assert meetings([rows[at] for at in chosen]) == meetings(rows)
    assert len(chosen) < len(rows) / (1, 4, 2, 1)[strength]


def test_one_parameter_is_covered_by_all_of_its_values() -> None:
    assert covering([(0,), (1,), (2,)], 2) == {0, 1, 2}


PLUGIN = """
    import pytest
    from tests.quick import leave_to_full_runs

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(items):
        leave_to_full_runs(items)
"""


def test_a_quick_run_takes_the_chosen_and_a_full_one_takes_all(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(PLUGIN)
    pytester.makeini("[pytest]\nmarkers =\n    full: a\n    covering(strength): b\n")
    pytester.makepyfile("""
        import pytest

        @pytest.fixture(params=["x", "y"])
        def own(request):
            return request.param

        @pytest.mark.covering(1)
        @pytest.mark.parametrize("a", [[1], [2], [3]])
        @pytest.mark.parametrize(("b", "c"), [(1, 1), (1, 2), (2, 1), (2, 2)])
        def test_it(a, b, c, own):
            pass
    """)
    pytester.runpytest_inprocess("-p", "no:xdist", "-m", "not full").assert_outcomes(passed=4, deselected=20)
    pytester.runpytest_inprocess("-p", "no:xdist").assert_outcomes(passed=24)
