"""Sampling together with drafts: any parameters give the tokens and logprobs of plain decoding."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from bankfull.config import SchedConfig, StateConfig
from bankfull.decode.plain import Plain
from bankfull.decode.strategy import DraftTree, Strategy
from bankfull.decode.verify import accepted_path
from bankfull.runtime.trees import paths_of
from bankfull.sample.grammar import DraftTokens
from bankfull.sample.params import SamplingParams, StructuredOutput
from tests.kit import Bench, Guess, GuessLookup, GuessTree, device_of, random_tree
from tests.tiny import VOCAB, kit_of, model_of

NEW = 24
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, logprobs=3),
    "sampled": SamplingParams(temperature=1.0, logprobs=2),
    "truncated": SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.01),
    "penalties": SamplingParams(
        temperature=1.0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4, logprobs=1
    ),
    "biased": SamplingParams(temperature=0.7, logit_bias={3: 2.0, 5: -4.0}, allowed_token_ids=list(range(2, 60))),
    "greedy penalties": SamplingParams(temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.3),
    "typical": SamplingParams(temperature=1.0, typical_p=0.8),
}
GRAMMAR = SamplingParams(temperature=1.0, structured=StructuredOutput(regex=".*"))
"""The runner needs to know that there is a grammar; the engine is given the matcher."""


class Ladder:
    """A grammar over token ids: each token must be near the one before it, and after `count` tokens it is complete.
    It stands in for a `Matcher`."""

    known = True

    def __init__(self, count: int, last: int = 0) -> None:
        self.count, self.last = count, last

    def _allowed(self, last: int) -> np.ndarray:
        bits = np.zeros((VOCAB + 31) // 32 * 32, np.uint8)
        bits[[(last + step) % VOCAB for step in (1, 2, 3, 5, 8)]] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def mask(self) -> np.ndarray:
        return self._allowed(self.last)

    def masks_along(self, drafts: DraftTokens) -> np.ndarray:
        masks = [self.mask()]
        for draft in range(len(drafts.tokens)):
            path = [draft]
            while (up := drafts.parents[path[-1]]) >= 0:
                path.append(up)
            other = Ladder(self.count, self.last)
            try:
                for node in reversed(path):
                    if not other.finished:
                        other.advance(drafts.tokens[node])
                masks.append(np.full_like(masks[0], -1) if other.finished else other.mask())
            except AssertionError:
                masks.append(np.zeros_like(masks[0]))
        return np.stack(masks)

    def advance(self, token: int) -> None:
        assert not self.finished and self._allowed(self.last)[token // 32] >> (token % 32) & 1, "forbidden"
        self.count, self.last = self.count - 1, token

    @property
    def finished(self) -> bool:
        return self.count == 0


DRAFTERS = pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ("llama", GuessTree),
        ("gemma", GuessTree),
        ("llama", Guess),
        ("mamba", Guess),
        ("llama", GuessLookup),
        ("mamba", GuessLookup),
    ],
)
"""Drafters, and the models that can verify their drafts."""


@pytest.mark.parametrize("depth", (0, 1))
@DRAFTERS
def test_each_draft_is_verified_under_the_grammar_after_its_own_path(
    shape: str, kind: type[Guess | GuessLookup], depth: int
) -> None:
    def run(strategy: Strategy) -> Bench:
        bench = bench_of(strategy, shape, depth)
        for i, params in enumerate((GRAMMAR, replace(GRAMMAR, temperature=0.0), GRAMMAR)):
            bench.add(i, [i + 1, 5, 7], NEW, params=params, seed=i, matchers=[Ladder(9 + 5 * i)])
        bench.add("free", [3, 4], NEW)
        bench.run(preempt=random.Random(2))
        return bench

    plain = run(Plain())
    assert [len(plain.tokens[i, 0]) for i in range(3)] == [9, 14, 19]
    assert {plain.finish[i, 0] for i in range(3)} == {"stop"}
    truths = [plain.prompts[name] + tokens for (name, _), tokens in plain.tokens.items()]
    strategy = kind(truths, width=6, seed=depth)
    drafted = run(strategy)
    assert drafted.tokens == plain.tokens and drafted.finish == plain.finish
    assert_accepted(drafted, strategy)


@pytest.mark.parametrize("depth", (0, 1))
@DRAFTERS
def test_what_drafts_behind_a_complete_grammar_lead_to_is_dropped(
    shape: str, kind: type[Guess | GuessLookup], depth: int
) -> None:
    """Behind its end a sequence runs freely, until its step settles: into the token that ends requests, into its limit,
    and to a place where its bans leave no token. Plain decoding goes to none of these."""
    rooms, params = (6, 7, 13), replace(GRAMMAR, temperature=0.0, logprobs=1)

    def run(strategy: Strategy, more: dict[int, dict[str, object]]) -> Bench:
        bench = bench_of(strategy, shape, depth)
        for i, count in enumerate(rooms):
            bench.add(i, [i + 1, 5, 7], **{"count": NEW, "params": params, "matchers": [Ladder(count)], **more[i]})
        bench.run()
        return bench

    plain = run(Plain(), {i: {} for i in range(3)})
    beyond = bench_of(Plain(), shape, depth)
    for i, count in enumerate(rooms):
        beyond.add(i, plain.prompts[i] + plain.tokens[i, 0], NEW - count)
    beyond.run()
    free = beyond.tokens[1, 0]
    assert not set(free[:1]) & set(plain.tokens[1, 0]), "the end token must come behind the grammar's end"
    around = plain.tokens[2, 0][-1], beyond.tokens[2, 0][0]
    nothing = replace(params, bad_word_ids=tuple((*around, token) for token in range(VOCAB)))
    more: dict[int, dict[str, object]] = {0: {"count": 7}, 1: {"stop": free[:1]}, 2: {"params": nothing}}
    truths = [plain.prompts[i] + plain.tokens[i, 0] + beyond.tokens[i, 0] for i in range(3)]
    drafted = run(kind(truths, width=6, seed=depth), more)
    assert drafted.tokens == plain.tokens and drafted.finish == plain.finish
    for key, tokens in plain.tokens.items():
        assert sum(len(extra.logprobs[: len(tokens)]) for extra in drafted.extras[key] if extra) == len(tokens)


@pytest.mark.parametrize("kind", (Guess, GuessLookup))
def test_a_constrained_request_may_end_while_its_drafts_are_verified(kind: type[Guess | GuessLookup]) -> None:
    def constrained(strategy: Strategy) -> Bench:
        bench = bench_of(strategy, "llama", 1)
        bench.add("gone", [1, 5, 7], NEW, params=GRAMMAR, matchers=[Ladder(NEW)])
        return bench

    plain = constrained(Plain())
    plain.run()
    bench = constrained(kind([[1, 5, 7, *plain.tokens["gone", 0]]], width=2, seed=0))
    for _ in range(4):
        bench.engine.step()
    bench.engine.abort("gone")
    while bench.engine.busy:
        bench.engine.step()


def assert_accepted(bench: Bench, strategy: Guess | GuessLookup) -> None:
    if isinstance(strategy, Guess):
        assert strategy.accepted > strategy.proposed / 4, "hardly any draft was accepted"
    else:
        totals = bench.engine.totals
        assert sum(totals.accepted) > sum(totals.drafted) / 4, "hardly any draft was accepted"


def bench_of(strategy: Strategy, shape: str, depth: int) -> Bench:
    return Bench(
        model_of(shape, torch.float32, "auto"),
        device_of(depth, seed=3),
        depth,
        SchedConfig(rows=4, step_tokens=64),
        StateConfig(page_tokens=4),
        strategy,
        kit=kit_of(shape, torch.float32, "auto"),
    )


def generated(
    strategy: Strategy, shape: str, depth: int, n: int = 2
) -> tuple[Bench, dict[tuple[object, int], list[int]]]:
    bench = bench_of(strategy, shape, depth)
    rng = random.Random(5)
    for name, params in PARAMS.items():
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
        bench.add(name, prompt, NEW, n=n, params=params, seed=rng.randrange(1 << 40))
    bench.run(preempt=random.Random(1))
    return bench, bench.tokens


@pytest.mark.parametrize("depth", (0, 1))
@DRAFTERS
def test_drafts_change_neither_sampled_tokens_nor_logprobs(
    shape: str, kind: type[Guess | GuessLookup], depth: int
) -> None:
    plain, expected = generated(Plain(), shape, depth)
    truths = [plain.prompts[name] + tokens for (name, _), tokens in expected.items()]
    strategy = kind(truths, width=7, seed=depth)
    drafted, got = generated(strategy, shape, depth)
    assert got == expected
    assert_accepted(drafted, strategy)
    for key, extras in plain.extras.items():
        ours = [entry for extra in drafted.extras[key] for entry in extra.logprobs]
        theirs = [entry for extra in extras for entry in extra.logprobs]
        assert [entry.top_ids for entry in ours] == [entry.top_ids for entry in theirs]
        assert [entry.logprob for entry in ours] == pytest.approx([entry.logprob for entry in theirs], abs=1e-4)


@pytest.mark.parametrize("seed", range(200))
def test_the_accepted_path_is_the_one_that_a_walk_finds(seed: int) -> None:
    rng = random.Random(seed)
    rows = [
        random_tree(rng, [rng.randrange(7) for _ in range(9)], rng.randint(0, 20)) for _ in range(rng.randint(1, 4))
    ]
    chosen = [[rng.choice((0, 1, 2, 3, 4, 5, 6, -1)) for _ in range(len(row) + 1)] for row in rows]
    widths = [len(row) + 1 for row in rows]
    expected = []
    for drafts, after in zip(rows, chosen, strict=True):
        expected.append(longest_walk(drafts, after, [0]))
    tree = DraftTree(
        torch.tensor([parent + 1 if line else 0 for row in rows for line, (_, parent) in enumerate([(0, -1), *row])]),
        torch.tensor([token for row in rows for token, _ in [(rng.randrange(7), -1), *row]]),
    )
    rectangle = torch.full((len(rows), max(widths)), -1)
    for i, after in enumerate(chosen):
        rectangle[i, : len(after)] = torch.tensor(after)
    path, counts = accepted_path(rectangle, tree, widths, torch.tensor)
    assert [line[:count].tolist() for line, count in zip(path, counts.tolist(), strict=True)] == expected


def longest_walk(drafts: list[tuple[int, int]], chosen: list[int], path: list[int]) -> list[int]:
    """A token may be drafted twice after a line: the longer way counts, among equals the one that ends earlier."""
    wanted = (chosen[path[-1]], path[-1] - 1)
    ways = [longest_walk(drafts, chosen, [*path, i + 1]) for i, d in enumerate(drafts) if d == wanted and d[0] >= 0]
    return max(ways, key=lambda way: (len(way), -way[-1]), default=path)


@pytest.mark.parametrize("seed", range(50))
def test_paths_follow_from_parents(seed: int) -> None:
    rng = random.Random(seed)
    width = rng.randint(1, 63)
    parents = [[rng.choice((node - 1, rng.randrange(-1, node))) for node in range(width)] for _ in range(3)]
    paths = paths_of(torch.tensor(parents))
    for row, line in enumerate(parents):
        for node in range(width):
            path, up = [node + 1], node
            while (up := line[up]) >= 0:
                path.append(up + 1)
            mask = sum(1 << i for i in [0, *path])
            assert int(paths.ancestors[row, node + 1]) & (1 << 64) - 1 == mask
            assert int(paths.depths[row, node + 1]) == len(path)
            assert int(paths.parents[row, node + 1]) == line[node] + 1
        assert (int(paths.ancestors[row, 0]), int(paths.depths[row, 0])) == (1, 0)
