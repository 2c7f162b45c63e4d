"""What a strategy gets from the runner: hidden states of the newest tokens, and every step to follow."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from bankfull.config import SchedConfig, StateConfig
from bankfull.decode.plain import Plain
from bankfull.decode.strategy import ComputedStep, Draft, Verdict, View
from bankfull.runtime.rows import Rows
from bankfull.state.spec import Paged, Recurrent, Shared, TensorSpec, joined_states, layout_of
from tests.kit import Bench, Guess, GuessTree, device_of
from tests.tiny import VOCAB, kit_of, model_of

NEW = 16


def prompts_of(count: int) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))] for _ in range(count)]


def bench_of(strategy: Plain | Guess, shape: str, depth: int) -> Bench:
    return Bench(
        model_of(shape, torch.float32, "auto"),
        device_of(depth, seed=depth),
        depth,
        SchedConfig(rows=3, step_tokens=12),
        StateConfig(page_tokens=4),
        strategy,
        kit=kit_of(shape, torch.float32, "auto"),
    )


def generated(strategy: Plain | Guess, shape: str, depth: int) -> Bench:
    bench = bench_of(strategy, shape, depth)
    for i, prompt in enumerate(prompts_of(5)):
        bench.add(i, prompt, NEW)
    bench.run(preempt=random.Random(2))
    return bench


class Watching:
    """Mixed into a strategy: compares what it is given with what the rows hold."""

    follows = True
    rows: Rows

    def watch(self) -> None:
        self.checked, self.followed = 0, 0

    def follow(self, step: ComputedStep) -> None:
        batch = step.batch
        assert len(step.hidden) == len(batch.tokens) == sum(w.count + w.drafts for w in step.work)
        for i, work in enumerate(step.work):
            first, last = int(batch.q_start[i]), int(batch.q_start[i]) + work.count
            begin = int(self.rows.computed[work.row])
            assert batch.positions[first:last].tolist() == list(range(begin, begin + work.count))
            known = self.rows.tokens[work.row, begin : begin + work.count]
            assert batch.tokens[first:last].tolist() == known.tolist()
        self.followed += 1

    def newest(self, view: View) -> None:
        best = self.head.best(view.hidden)  # type: ignore[attr-defined]
        assert best.tolist() == view.tokens[view.rows, view.known[view.rows] - 1].tolist()
        self.checked += 1


class WatchingChains(Watching, Guess):
    def propose(self, view: View) -> Draft | None:
        self.newest(view)
        return super().propose(view)


class WatchingTrees(Watching, GuessTree):
    def propose(self, view: View) -> Draft | None:
        self.newest(view)
        return super().propose(view)


@pytest.mark.parametrize("depth", (0, 1))
@pytest.mark.parametrize(
    ("shape", "kind"), [("llama", WatchingChains), ("gemma", WatchingTrees), ("mamba", WatchingChains)]
)
def test_greedy_tokens_follow_from_the_hidden_states_of_a_view(shape: str, kind: type[Guess], depth: int) -> None:
    plain = generated(Plain(), shape, depth)
    truths = [plain.prompts[name] + tokens for (name, _), tokens in plain.tokens.items()]
    strategy = kind(truths, width=5)
    assert isinstance(strategy, Watching)
    strategy.watch()
    bench = bench_of(strategy, shape, depth)
    strategy.head, strategy.rows = bench.model.head, bench.runner.rows  # type: ignore[attr-defined]
    for i, prompt in enumerate(prompts_of(5)):
        bench.add(i, prompt, NEW)
    bench.run(preempt=random.Random(2))
    assert bench.tokens == plain.tokens
    assert strategy.checked and strategy.followed >= strategy.checked and strategy.accepted


class Observing(Plain):
    """Idle: the runner must not call it."""

    def observe(self, view: View, verdict: Verdict) -> None:
        raise AssertionError("an idle strategy learns nothing")


def test_an_idle_strategy_is_not_called() -> None:
    bench = generated(Observing(), "llama", 0)
    assert all(len(tokens) == NEW for tokens in bench.tokens.values())


K, V = TensorSpec("k", (2, 8), "float32"), TensorSpec("v", (1, 4), "float32")
FULL, OTHER, SSM = Paged((K,)), Paged((V,)), Recurrent((K,))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([(FULL,)] * 2, [(FULL,)]),
        ([(FULL,)] * 2, [(OTHER,), (Shared(0),)]),
        ([(SSM,), (FULL,)], [(FULL,), (Shared(0),)]),
        ([(SSM,)], [(OTHER,)]),
    ],
)
def test_two_models_share_a_layout(first: Sequence[tuple[object, ...]], second: Sequence[tuple[object, ...]]) -> None:
    layout = layout_of(joined_states(first, second), 4)  # type: ignore[arg-type]
    ours, theirs = layout.part(0, len(first)), layout.part(len(first), len(second))
    assert ours.paged == theirs.paged == layout.paged
    assert (*ours.groups, *theirs.groups) == layout.groups and (*ours.owners, *theirs.owners) == layout.owners
    assert (ours.recurrent is None) == (SSM not in [spec for states in first for spec in states])
    assert theirs.recurrent is None, "the second model has none"
    for layer, states in enumerate(second):
        for spec, owner in zip(states, theirs.owners[layer], strict=True):
            expected = spec.layer if isinstance(spec, Shared) else layer
            assert owner[0] == len(first) + expected, "its layers share states among themselves only"
