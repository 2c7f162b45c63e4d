"""A second model as drafter: its drafts change no token, and an equal one is always right."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bankfull.config import SchedConfig, StateConfig
from bankfull.decode.draft import DraftModel, tree_along_chain
from bankfull.decode.plain import Plain
from bankfull.decode.strategy import Draft, OwnModel, Sampling, Scores, Strategy, Verdict, View
from bankfull.errors import ConfigError
from bankfull.runtime.rows import Job
from bankfull.sample.logits import SamplingTable, sample, sample_several
from bankfull.sample.params import SamplingParams
from bankfull.types import Enter
from tests.kit import GREEDY, Bench, device_of
from tests.quick import examples
from tests.test_drafts import GRAMMAR, PARAMS, Ladder
from tests.tiny import VOCAB, kit_of, model_of

NEW = 24
CHAIN, TREE = (1, 1, 1, 1), (3, 2, 1, 2)
How = tuple[torch.dtype, str]
FLOAT32: How = (torch.float32, "auto")
FLOAT64: How = (torch.float64, "torch")


class CountingDraft(DraftModel):
    """Counts, over all rows: the drafts on the best path that were proposed and verified, and the accepted ones."""

    depth = accepted = 0

    def __init__(self, own: OwnModel, branching: Sequence[int]) -> None:
        super().__init__(own, branching)
        self.proposed: dict[int, int] = {}
        """By row. A sequence that has just entered has none, although its row may verify what is there."""

    def begin(self, rows: Sequence[int]) -> None:
        super().begin(rows)
        self.proposed.update(dict.fromkeys(rows, 0))

    def propose(self, view: View) -> Draft | None:
        room = self._steps.room(view.host_rows, self.ahead).tolist()
        self.proposed.update(zip(view.host_rows, room, strict=True))
        return super().propose(view)

    def verify(self, scores: Scores, sampling: Sampling) -> Verdict:
        verdict = super().verify(scores, sampling)
        if verdict.counts is not None:
            rows = [sampling.host_rows[last - 1] for last in accumulate(sampling.widths)]
            for row, width, count in zip(rows, sampling.widths, verdict.counts.tolist(), strict=True):
                self.depth += min(width - 1, self.proposed[row])
                self.accepted += min(count - 1, self.proposed[row])
        return verdict


def drafter(shape: str, how: How = FLOAT32, branching: Sequence[int] = CHAIN) -> CountingDraft:
    return CountingDraft(OwnModel(model_of(shape, *how), kit_of(shape, *how)), branching)


def bench_of(strategy: Strategy, shape: str, depth: int, how: How = FLOAT32, **more: object) -> Bench:
    given = {"sched": SchedConfig(rows=4, step_tokens=64), "state": StateConfig(page_tokens=4), **more}
    return Bench(
        model_of(shape, *how),
        device_of(depth, seed=3),
        depth,
        strategy=strategy,
        kit=kit_of(shape, *how),
        **given,  # type: ignore[arg-type]
    )


def ask(bench: Bench, params: dict[str, SamplingParams], n: int = 1, new: int = NEW) -> None:
    rng = random.Random(5)
    for name, each in params.items():
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
        bench.add(name, prompt, new, n=n, params=each, seed=rng.randrange(1 << 40))


@pytest.mark.parametrize("depth", (0, 1))
@pytest.mark.parametrize("branching", (CHAIN, TREE), ids=("chain", "tree"))
@pytest.mark.parametrize("shape", ("llama", "gemma"))
@pytest.mark.parametrize("params", (GREEDY, SamplingParams(temperature=1.0)), ids=("greedy", "sampled"))
def test_a_drafter_equal_to_the_target_is_always_right(
    shape: str, params: SamplingParams, branching: Sequence[int], depth: int
) -> None:
    """Also after chunks, a preemption and a fork: its keys and values are those of the target."""
    strategy = drafter(shape, branching=branching)
    bench = bench_of(strategy, shape, depth, sched=SchedConfig(rows=8, step_tokens=16))
    ask(bench, {str(i): params for i in range(3)}, n=2)
    bench.run(preempt=random.Random(1))
    plain = bench_of(Plain(), shape, depth)
    ask(plain, {str(i): params for i in range(3)}, n=2)
    plain.run()
    assert bench.tokens == plain.tokens
    assert strategy.accepted == strategy.depth > NEW


@examples(20)
@given(
    st.sampled_from(("llama", "gemma")),
    st.lists(st.integers(1, 3), min_size=1, max_size=5),
    st.integers(9, 40),
    st.sampled_from((1, 3, 8)),
    st.integers(1, 40),
    st.integers(0, 1 << 20),
)
def test_whatever_memory_allows_an_equal_drafter_is_right_where_it_drafts(
    shape: str, branching: list[int], frames: int, page: int, chunk: int, seed: int
) -> None:
    """Few pages: some rows have no room for drafts, others are preempted. No key or value of the drafter is ever
    missing, wrong, or another sequence's: that would cost an acceptance, or give NaN."""
    depth = seed % 2
    strategy = drafter(shape, FLOAT64, branching)
    rng = random.Random(seed)
    asked = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))] for _ in range(4)]
    most = max(frames, -(-16 // page) * (1 if shape == "llama" else 3) + 2)
    bench, plain = (
        bench_of(
            each,
            shape,
            depth,
            FLOAT64,
            sched=SchedConfig(rows=3, step_tokens=chunk),
            state=StateConfig(page_tokens=page),
            frames=pages,
        )
        for each, pages in ((strategy, most), (Plain(), 400))
    )
    for each in (bench, plain):
        for i, prompt in enumerate(asked):
            params = SamplingParams(temperature=1.0) if i % 2 else GREEDY
            each.add(i, prompt, 16 - len(prompt), params=params, seed=i)
        each.run()
    assert bench.tokens == plain.tokens
    assert strategy.accepted == strategy.depth


@pytest.mark.few(2)
@pytest.mark.parametrize("depth", (0, 1))
@pytest.mark.parametrize(
    ("shape", "drafts", "branching"),
    [("llama", "gemma", TREE), ("gemma", "llama", CHAIN), ("gemma", "llama", TREE), ("mamba", "llama", CHAIN)],
)
def test_another_model_changes_neither_tokens_nor_logprobs(
    shape: str, drafts: str, branching: Sequence[int], depth: int
) -> None:
    """With penalties, biases, truncation, `n` and preemption, and for a target with recurrent state."""
    plain, drafted = bench_of(Plain(), shape, depth), bench_of(drafter(drafts, branching=branching), shape, depth)
    for bench in (plain, drafted):
        ask(bench, PARAMS, n=2)
        bench.run(preempt=random.Random(1))
    assert drafted.tokens == plain.tokens
    for key, extras in plain.extras.items():
        ours = [entry.logprob for extra in drafted.extras[key] for entry in extra.logprobs]
        assert ours == pytest.approx([entry.logprob for extra in extras for entry in extra.logprobs], abs=1e-4)


@pytest.mark.parametrize("branching", (CHAIN, TREE), ids=("chain", "tree"))
@pytest.mark.parametrize("params", PARAMS)
def test_an_equal_drafter_applies_penalties_and_biases(params: str, branching: Sequence[int]) -> None:
    strategy = drafter("llama", branching=branching)
    bench = bench_of(strategy, "llama", 0)
    ask(bench, {params: PARAMS[params]})
    bench.run()
    assert strategy.accepted == strategy.depth > NEW / 2


@pytest.mark.parametrize("depth", (0, 1))
@pytest.mark.parametrize("branching", (CHAIN, TREE), ids=("chain", "tree"))
def test_drafts_are_verified_under_a_grammar(branching: Sequence[int], depth: int) -> None:
    plain, drafted = (bench_of(each, "llama", depth) for each in (Plain(), drafter("llama", branching=branching)))
    for bench in (plain, drafted):
        for i, params in enumerate((GRAMMAR, replace(GRAMMAR, temperature=0.0), GRAMMAR)):
            bench.add(i, [i + 1, 5, 7], NEW, params=params, seed=i, matchers=[Ladder(9 + 5 * i)])
        bench.add("free", [3, 4], NEW)
        bench.run(preempt=random.Random(2))
    assert drafted.tokens == plain.tokens and drafted.finish == plain.finish


@pytest.mark.parametrize("depth", (0, 1))
@pytest.mark.parametrize("target_kv", (None, torch.int8))
def test_keys_and_values_of_both_models_may_be_rounded(target_kv: torch.dtype | None, depth: int) -> None:
    """The drafter's K/V in int8 beside the target's in float32 are two groups of pages."""
    rounded = (torch.float32, "auto", torch.int8)
    how = (torch.float32, "auto", target_kv)

    def run(strategy: Strategy) -> Bench:
        model, kit = model_of("llama", *how), kit_of("llama", *how)
        bench = Bench(
            model,
            device_of(depth, seed=3),
            depth,
            SchedConfig(rows=3, step_tokens=16),
            StateConfig(page_tokens=4),
            strategy,
            kit=kit,
        )
        ask(bench, {str(i): GREEDY for i in range(4)})
        bench.run(preempt=random.Random(4))
        return bench

    strategy = CountingDraft(OwnModel(model_of("llama", *rounded), kit_of("llama", *rounded)), TREE)
    drafted = run(strategy)
    assert len(drafted.runner.layout.paged) == (1 if target_kv else 2)
    assert drafted.tokens == run(Plain()).tokens
    assert strategy.accepted == strategy.depth if target_kv else strategy.accepted > strategy.depth / 2


def test_a_prefix_hit_finds_the_keys_of_the_drafter() -> None:
    strategy = drafter("llama")
    bench = bench_of(strategy, "llama", 0)
    prompt = [(7 * i) % VOCAB for i in range(40)]
    for name in ("first", "second"):
        bench.add(name, prompt, NEW)
        bench.run()
        assert strategy.accepted == strategy.depth
    assert bench.cached["second"] > 30


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7).filter(lambda found: sum(found) < 64))
def test_a_tree_has_its_branches_at_every_depth(branching: list[int]) -> None:
    parents = tree_along_chain(branching).tolist()
    depths: list[int] = []
    for node, parent in enumerate(parents):
        assert -1 <= parent < node, "parents come first"
        depths.append(1 if parent < 0 else depths[parent] + 1)
    assert [depths.count(depth + 1) for depth in range(len(branching))] == branching
    assert parents[: len(branching)] == list(range(-1, len(branching) - 1)), "the best path comes first"


@given(st.integers(0, 1 << 40), st.integers(1, 20), st.integers(0, 50))
def test_several_samples_begin_with_the_one_that_is_sampled(seed: int, count: int, position: int) -> None:
    table = SamplingTable(3, VOCAB)
    jobs = [Job(SamplingParams(temperature=t), seed) for t in (0.0, 1.0, 0.4)]
    table.set([Enter(i, i, (1,), 0, 1, 0, 0, job) for i, job in enumerate(jobs)])
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(seed % 1000)) * 3
    rows, length = torch.arange(3), torch.full((3,), position + 1)
    asked = (logits, rows, table, torch.zeros(3, 60, dtype=torch.long), length)
    found = sample_several(*asked, count, host_rows=[0, 1, 2])
    assert found[:, 0].tolist() == sample(*asked, host_rows=[0, 1, 2]).tokens.tolist()
    assert all(len(set(line)) == count for line in found.tolist())
    assert found[0].tolist() == logits[0].topk(count).indices.tolist()


@pytest.mark.parametrize(
    ("branching", "sentence"),
    [
        ((), "is not a tree"),
        ((1, 0), "is not a tree"),
        ((8,) * 8, "64 draft tokens, but a step verifies at most 63"),
    ],
)
def test_trees_that_no_step_can_verify_are_refused(branching: Sequence[int], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        drafter("llama", branching=branching)
