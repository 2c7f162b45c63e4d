"""The width of a step is the one with the highest measured rate, and trials of others cost little."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bankfull.decode.adaptive import LOSS_SHARE, AdaptiveWidth, halved, load_of
from bankfull.decode.draft import DraftModel
from bankfull.decode.plain import Plain
from bankfull.decode.strategy import OwnModel, Strategy
from bankfull.sample.params import SamplingParams
from tests.decode.test_draft import CHAIN, FLOAT64, NEW, TREE, ask, bench_of
from tests.kit import GREEDY, GuessLookup, GuessTree
from tests.tiny import kit_of, model_of

WIDTHS = (1, 2, 4, 8)
Costs = Callable[[int, int], float]


class Machine:
    """Runs steps of known cost and acceptance with the widths that are chosen."""

    def __init__(self, widths: Sequence[int], seed: int = 0) -> None:
        self.adaptive = AdaptiveWidth(widths)
        self.used: list[int] = []
        self._random = random.Random(seed)

    def run(self, steps: int, rows: int, chances: Sequence[float], cost: Costs) -> tuple[float, float]:
        """Tokens of a row and seconds. `chances`: that a draft and all before it are accepted."""
        tokens = seconds = 0.0
        for _ in range(steps):
            width = self.adaptive.next(rows)
            accepted = sum(self._drawn(width, chances) for _ in range(rows)) / rows
            took = cost(rows, width) * self._random.uniform(0.97, 1.03)
            self.adaptive.observe(rows, width, accepted, took)
            self.used.append(width)
            tokens, seconds = tokens + 1 + accepted, seconds + took
        return tokens, seconds

    def _drawn(self, width: int, chances: Sequence[float]) -> int:
        drawn = self._random.random()
        return sum(drawn < chance for chance in chances[:width])


def rate(width: int, rows: int, chances: Sequence[float], cost: Costs) -> float:
    return (1 + sum(chances[:width])) / cost(rows, width)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.floats(0.0, 0.95), min_size=8, max_size=8),
    st.floats(0.005, 0.6),
    st.floats(0.0, 0.3),
    st.sampled_from((1, 8, 64)),
    st.integers(0, 1 << 20),
)
def test_no_width_of_the_same_strategy_is_much_faster(
    conditional: list[float], per_token: float, proposing: float, rows: int, seed: int
) -> None:
    chances = [1.0]
    for chance in conditional:
        chances.append(chances[-1] * chance)
    chances = chances[1:]

    def cost(rows: int, width: int) -> float:
        return 1.0 + per_token * rows * width / 8 + (proposing if width else 0.0)

    machine = Machine(WIDTHS, seed)
    machine.run(1500, rows, chances, cost)  # until all widths are measured
    tokens, seconds = machine.run(2500, rows, chances, cost)
    best = max(rate(width, rows, chances, cost) for width in (0, *WIDTHS))
    assert tokens / seconds >= best * (1 - LOSS_SHARE - 0.08)


@pytest.mark.parametrize("rows", (1, 8, 64))
def test_drafts_that_are_always_wrong_cost_less_than_3_percent(rows: int) -> None:
    machine = Machine(WIDTHS)
    tokens, seconds = machine.run(1000, rows, [0.0] * 8, lambda rows, width: 1.0 + 0.3 * width)
    assert tokens / seconds > 0.97
    assert machine.used[0] == 8, "the strategy that the user chose begins"


def test_a_change_of_requests_or_load_is_found() -> None:
    def cost(rows: int, width: int) -> float:
        return 1.0 + 0.02 * width * rows

    machine = Machine(WIDTHS)
    machine.run(1500, 1, [0.0] * 8, cost)
    assert machine.adaptive.best(load_of(1)) == 0
    machine.run(6000, 1, [0.9**k for k in range(1, 9)], cost)
    assert machine.adaptive.best(load_of(1)) == 8
    machine.run(300, 64, [0.9**k for k in range(1, 9)], cost)
    assert machine.adaptive.best(load_of(64)) == 0


@pytest.mark.parametrize(
    ("width", "widths"), [(1, (1,)), (2, (2,)), (3, (1, 3)), (8, (2, 4, 8)), (63, (1, 3, 7, 15, 31, 63))]
)
def test_widths_are_halved(width: int, widths: tuple[int, ...]) -> None:
    assert halved(width) == widths


class AnyWidth(AdaptiveWidth):
    """Changes its mind at random, often to 0."""

    def __init__(self, widest: int, seed: int) -> None:
        super().__init__(range(1, widest + 1))
        self._random = random.Random(seed)

    def next(self, rows: int) -> int:
        return self._random.choice((0, 0, 0, self._random.randint(1, self.widest), self.widest))


@pytest.mark.parametrize("depth", (0, 1))
@pytest.mark.parametrize("branching", (CHAIN, TREE), ids=("chain", "tree"))
@pytest.mark.parametrize("lookup", (False, True), ids=("alone", "after lookup"))
@pytest.mark.parametrize("seed", range(3))
def test_an_equal_drafter_stays_right_when_steps_skip_it(
    seed: int, lookup: bool, branching: Sequence[int], depth: int
) -> None:
    """It runs the tokens later that it has skipped, and those of drafts that were not its own: each of its drafts is
    accepted, in float64."""
    plain = bench_of(Plain(), "llama", depth, FLOAT64)
    params = {str(i): GREEDY if i % 2 else SamplingParams(temperature=1.0) for i in range(4)}
    ask(plain, params)
    plain.run()
    strategy = DraftModel(OwnModel(model_of("llama", *FLOAT64), kit_of("llama", *FLOAT64)), branching)
    truths = [list(plain.prompts[name]) + tokens for (name, _), tokens in plain.tokens.items()]
    bench = bench_of(
        strategy,
        "llama",
        depth,
        FLOAT64,
        adaptive=AnyWidth(strategy.width(0), seed),
        lookup=GuessLookup(truths, 5, seed) if lookup else None,
    )
    ask(bench, params)
    bench.run(preempt=random.Random(seed))
    assert bench.tokens == plain.tokens
    totals = bench.engine.totals
    assert sum(totals.accepted) > NEW
    if not lookup and branching == CHAIN:
        assert totals.accepted == totals.drafted


@pytest.mark.parametrize("depth", (0, 1))
@pytest.mark.parametrize("seed", range(3))
def test_trees_go_together_with_lookup_and_any_width(seed: int, depth: int) -> None:
    plain = bench_of(Plain(), "llama", depth)
    ask(plain, {str(i): GREEDY for i in range(4)}, n=2)
    plain.run()
    truths = [list(plain.prompts[name]) + tokens for (name, _), tokens in plain.tokens.items()]
    strategy: Strategy = GuessTree(truths, 4, seed)
    bench = bench_of(strategy, "llama", depth, adaptive=AnyWidth(4, seed), lookup=GuessLookup(truths, 6, seed))
    ask(bench, {str(i): GREEDY for i in range(4)}, n=2)
    bench.run(preempt=random.Random(seed))
    assert bench.tokens == plain.tokens
    assert len(bench.engine.totals.drafted) == 6, "guesses of the host may be longer than the strategy's drafts"
