"""The width of a step is the one with the highest measured rate, and trials of others cost little."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from bankfull.config import StateConfig
from bankfull.decode.adaptive import AdaptiveWidth, DraftChoice, DraftRow, halved
from bankfull.decode.draft import DraftModel
from bankfull.decode.plain import Plain
from bankfull.decode.strategy import OwnModel, Strategy
from bankfull.sample.params import SamplingParams
from tests.decode.test_draft import CHAIN, FLOAT64, NEW, TREE, ask, bench_of
from tests.kit import GREEDY, GuessLookup, GuessTree
from tests.tiny import kit_of, model_of


@pytest.mark.parametrize(
    ("width", "widths"), [(1, (1,)), (2, (2,)), (3, (1, 3)), (8, (2, 4, 8)), (63, (1, 3, 7, 15, 31, 63))]
)
def test_widths_are_halved(width: int, widths: tuple[int, ...]) -> None:
    assert halved(width) == widths


class AnyWidth(AdaptiveWidth):
    """Changes its mind at random, often to 0, and leaves out rows and prompts as it likes."""

    def __init__(self, widest: int, seed: int) -> None:
        super().__init__(range(1, widest + 1))
        self._random = random.Random(seed)

    def choose(self, rows: Sequence[DraftRow]) -> DraftChoice:
        width = self._random.choice((0, 0, 0, self._random.randint(1, self.widest), self.widest))
        able = [one.row for one in rows if one.behind >= 0 and (width or not one.samples)]
        return DraftChoice(width, frozenset(row for row in able if self._random.random() < 0.8))


@pytest.mark.few(3)
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
        # What it was left out of may lie in the prefix cache, where it is noticed only after a while.
        state=StateConfig(page_tokens=4, prefix_cache=lookup),
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


def test_nothing_is_remembered_of_sequences_that_have_ended() -> None:
    """Also of those that were aborted while a step with them was in flight."""
    strategy = DraftModel(OwnModel(model_of("llama", *FLOAT64), kit_of("llama", *FLOAT64)))
    chooser = AdaptiveWidth(strategy.widths(), 1.0)
    bench = bench_of(strategy, "llama", 1, FLOAT64, adaptive=chooser)
    ask(bench, {str(i): GREEDY for i in range(3)}, n=2)
    for _ in range(12):
        bench.step()
    bench.take(bench.engine.abort("0"))
    bench.run()
    speculating = bench.engine.adaptive
    assert speculating is not None and not speculating._running and not speculating._planned
    assert not chooser._generated and not chooser._follows and not chooser._accepted._requests
