"""What a quick run leaves to `make test-full`: combinations of parameters, and generated examples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest

FULL_EXAMPLES = 100
QUICK_EXAMPLES, FEWEST_EXAMPLES = 15, 8
"""Of each hundred, and at the least."""


def is_quick(config: pytest.Config) -> bool:
    return config.option.markexpr == "not full"


def examples(count: int, **more: Any) -> Any:
    """Hypothesis' settings for that many examples; a quick run takes its share of them."""
    from hypothesis import settings

    share = count * settings().max_examples // FULL_EXAMPLES
    return settings(max_examples=min(count, max(FEWEST_EXAMPLES, share)), **more)


def covering(rows: Sequence[Sequence[Any]], strength: int) -> set[int]:
    """Some of the rows, chosen greedily: values that meet in `strength` columns of any row meet in a chosen one."""
    needs = [set(combinations(enumerate(row), min(strength, len(row)))) for row in rows]
    left = set[Any]().union(*needs)
    chosen = set[int]()
    while left:
        best = max(range(len(rows)), key=lambda at: (len(needs[at] & left), -at))
        chosen.add(best)
        left -= needs[best]
    return chosen


def spread(length: int, count: int) -> set[int]:
    """That many places, evenly spaced from the first on."""
    return {at * length // count for at in range(count)} if count < length else set(range(length))


STRENGTH = 1
"""Of tests without a `covering` mark: each value of each parameter once. What meets is the trial's matter, which draws
other combinations for every commit."""


def leave_to_full_runs(items: Iterable[pytest.Item]) -> None:
    """Marks as `full` what a quick run does not choose from a test's parameters."""
    families: dict[str, list[pytest.Item]] = {}
    for item in items:
        if (hasattr(item, "callspec") or item.get_closest_marker("few")) and not item.get_closest_marker("full"):
            families.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for family in families.values():
        chosen = _chosen(family)
        for at, item in enumerate(family):
            if at not in chosen:
                item.add_marker("full")


INTERPRETED, INTERPRETED_CASES = "test_triton_", 1
"""Modules of Triton kernels, which are slow where Python interprets them; `make test-gpu` has every case."""


def _chosen(family: Sequence[pytest.Item]) -> set[int]:
    if few := family[0].get_closest_marker("few"):
        return spread(len(family), *few.args)
    if family[0].path.name.startswith(INTERPRETED):
        return spread(len(family), INTERPRETED_CASES)
    mark = family[0].get_closest_marker("covering")
    return covering([values_of(item) for item in family], *(mark.args if mark else (STRENGTH,)))


def values_of(item: pytest.Item) -> list[tuple[int, ...]]:
    """One for each `parametrize`, whose names are one parameter, and one for each fixture with parameters. Values need
    not be hashable, but the items of a test share them."""
    params = dict(item.callspec.params)  # type: ignore[attr-defined]
    groups = [mark.args[0] for mark in item.iter_markers("parametrize")]
    names = [[name.strip() for name in group.split(",")] if isinstance(group, str) else group for group in groups]
    values = [tuple(id(params.pop(name)) for name in group) for group in names]
    return [*values, *((id(params[name]),) for name in sorted(params))]
