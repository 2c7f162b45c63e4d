"""Every lossless feature, alone and in combination, gives the greedy tokens of a plain loop without any cache.

CI runs a covering array in which every pair of settings occurs; `make test-full` runs the whole product.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import pytest
import torch

from bankfull.config import SchedConfig, StateConfig
from bankfull.decode.draft import DraftModel
from bankfull.decode.lookahead import Jacobi, Lookahead
from bankfull.decode.medusa import Medusa
from bankfull.decode.plain import Plain
from bankfull.decode.strategy import OwnModel, Strategy
from bankfull.decode.streaming import Streaming, TreeStreaming
from bankfull.errors import ConfigError, ModelError
from bankfull.runtime import naive
from bankfull.sched.pace import Pace
from bankfull.sched.policies import POLICIES
from tests.decode.test_eagle import random_eagle, strategy_of
from tests.decode.test_medusa import random_heads
from tests.decode.test_mtp import prediction
from tests.decode.test_streaming import random_streams
from tests.kit import Bench, Guess, GuessLookup, GuessTree, device_of
from tests.tiny import DEVICE, VOCAB, kit_of, model_of, reference_of

NEW = 20
RECURRENT = ("mamba", "mamba2", "s4", "hybrid", "lightning", "based", "delta")
"""Shapes with recurrent state."""
FEWEST_GUESSES = 10
"""Guesses of which at least one must be accepted."""


def drafter(shape: str, branching: Sequence[int]) -> DraftModel:
    """A model of its own arithmetic: that of the kernels, whatever the target is computed with."""
    how = (torch.float32, "auto")
    return DraftModel(OwnModel(model_of(shape, *how), kit_of(shape, *how)), branching)


STRATEGIES: dict[str, Callable[[Sequence[Sequence[int]], int], Strategy]] = {
    "plain": lambda truths, seed: Plain(),
    "drafts": lambda truths, seed: Guess(truths, seed=seed),
    "lookup": lambda truths, seed: GuessLookup(truths, seed=seed),
    "trees": lambda truths, seed: GuessTree(truths, width=5 + seed % 9, seed=seed),
    "draft": lambda truths, seed: drafter("llama", (1,) * (2 + seed % 4)),
    "draft-tree": lambda truths, seed: drafter("gemma", (3, 1, 2)),
    "medusa": lambda truths, seed: Medusa(random_heads(seed, heads=3, own=bool(seed % 2)), nodes=4 + seed % 29),
    "eagle": lambda truths, seed: strategy_of(random_eagle(seed, fused=bool(seed % 2)), depth=1 + seed % 4),
    "eagle-tree": lambda truths, seed: strategy_of(
        random_eagle(seed, fused=not seed % 2), depth=4, tree="dynamic", branch=3, nodes=5 + seed % 25
    ),
    "mtp": lambda truths, seed: prediction("latent", 1 + seed % 4),
    "lookahead": lambda truths, seed: Lookahead(1 + seed % 7, 2 + seed % 4, 1 + seed % 5),
    "jacobi": lambda truths, seed: Jacobi(1 + seed % 5),
    "streaming": lambda truths, seed: Streaming(random_streams(seed), nodes=4 + seed % 29),
    "tree-streaming": lambda truths, seed: TreeStreaming(random_streams(seed, count=3), nodes=4 + seed % 26),
}
"""Factories, called for each case with the sequences that greedy decoding gives and a seed."""
SETTINGS: dict[str, Sequence[object]] = {
    "shape": (
        "llama",
        "gemma",
        "shared",
        "latent",
        "experts",
        "mamba",
        "mamba2",
        "s4",
        "hybrid",
        "lightning",
        "based",
        "delta",
        "sparse",
    ),
    "cache": ("cold", "warm", "off"),
    "chunk": (1, 7, 64, 4096),
    "depth": (0, 1),
    "preempt": (False, True),
    "mates": (0, 4),
    "n": (1, 3),
    "page": (1, 4, 16),
    "strategy": tuple(STRATEGIES),
    "resumed": (False, True),
    "tiers": ("", "host", "disk", "both"),
    "policy": tuple(POLICIES),
}
Case = tuple[object, ...]
EVERY_STRATEGY = ("llama", "gemma", "mamba", "latent")
"""Shapes that meet every strategy in CI. The others meet those of `FEW_STRATEGIES`, because all drafts are verified
alike, however they are made. `make test-full` runs every pair."""
FEW_STRATEGIES = ("plain", "drafts", "lookup", "trees")


def in_ci(shape: object, strategy: object) -> bool:
    return shape in EVERY_STRATEGY or strategy in FEW_STRATEGIES


def must_meet(name: str, value: object, other: str, policy: object) -> bool:
    """Pairs that CI has to cover. Drafts are verified alike under every policy, and few shapes have state that a
    policy could treat in a way of its own."""
    return other != "policy" or (name != "strategy" and (name != "shape" or value in EVERY_STRATEGY))


def _every(*values: object) -> bool:
    return True


def pairwise(
    settings: dict[str, Sequence[object]],
    seed: int = 0,
    allowed: Callable[[object, object], bool] = _every,
    needed: Callable[[str, object, str, object], bool] = _every,
) -> list[Case]:
    """A small list of cases in which every two values of different settings meet: greedy, from random candidates.
    `allowed`: which values of `shape` and `strategy` may meet. `needed`: which values of two settings have to meet."""
    rng = random.Random(seed)
    values = list(settings.values())
    columns = list(itertools.combinations(range(len(values)), 2))
    missing = {(i, a, j, b) for i, j in columns for a in values[i] for b in values[j]}
    names = list(settings)
    missing = {key for key in missing if needed(names[key[0]], key[1], names[key[2]], key[3])}
    pair = (names.index("shape"), names.index("strategy")) if {"shape", "strategy"} <= set(names) else None
    if pair is not None:
        missing -= {(*key,) for key in missing if (key[0], key[2]) == pair and not allowed(key[1], key[3])}
    cases: list[Case] = []
    while missing:
        i, a, j, b = next(iter(sorted(missing, key=str)))
        candidates = []
        while len(candidates) < 40:
            case = [rng.choice(v) for v in values]
            case[i], case[j] = a, b
            if pair is None or allowed(case[pair[0]], case[pair[1]]):
                candidates.append(tuple(case))
        best = max(candidates, key=lambda c: sum((x, c[x], y, c[y]) in missing for x, y in columns))
        missing -= {(x, best[x], y, best[y]) for x, y in columns}
        cases.append(best)
    return cases


def test_the_covering_array_covers_every_pair() -> None:
    values, names = list(SETTINGS.values()), list(SETTINGS)
    for i, j in itertools.combinations(range(len(values)), 2):
        pairs = {(a, b) for a, b in itertools.product(values[i], values[j]) if must_meet(names[i], a, names[j], b)}
        if (names[i], names[j]) == ("shape", "strategy"):
            pairs = {pair for pair in pairs if in_ci(*pair)}
        met = {(c[i], c[j]) for c in FEW}
        assert met >= pairs
        assert met == pairs or names[j] == "policy"


def prompts() -> list[list[int]]:
    """Prompts that share beginnings, of lengths on and off every page border."""
    rng = random.Random(7)
    trunk = [rng.randrange(VOCAB) for _ in range(40)]
    return [trunk[:37], [*trunk[:16], 3, 1, 4], [5], trunk[:33], trunk[:20] + trunk[:12]]


@lru_cache
def truth(shape: str, prompt: tuple[int, ...], *how: object) -> tuple[int, ...]:
    """Greedy tokens by the bodies in float64 on the host, unless told `how` the model is made."""
    if how:
        tokens, margins = naive.generate(model_of(shape, *how), prompt, NEW, DEVICE)  # type: ignore[arg-type]
    else:
        tokens, margins = naive.generate(reference_of(shape), prompt, NEW, torch.device("cpu"))
    assert min(margins) > 1e-3, f"the oracle itself hesitates: {min(margins)}"
    return tuple(tokens)


def check(
    shape: str,
    cache: str,
    chunk: int,
    depth: int,
    preempt: bool,
    mates: int,
    n: int,
    page: int,
    strategy: str,
    resumed: bool = False,
    tiers: str = "",
    policy: str = "fcfs",
    dtype: torch.dtype = torch.float64,
    providers: str = "torch",
    kv_dtype: torch.dtype | None = None,
    moody: bool = False,
) -> int:
    """Rounded keys and values are compared with a plain loop that rounds them alike. `resumed`: each sample continues
    a different number of tokens that another engine has generated. Returns the largest number of cached tokens."""
    how = () if kv_dtype is None else (dtype, providers, kv_dtype)
    model = model_of(shape, *(how or (dtype, providers)))
    asked = prompts()[: 1 + mates]
    expected = [list(truth(shape, tuple(p), *how)) for p in asked]
    truths = [list(p) + tokens for p, tokens in zip(asked, expected, strict=True)]
    chosen = STRATEGIES[strategy](truths, chunk)
    if chosen.trees and shape in RECURRENT:
        with pytest.raises(ConfigError, match="recurrent state verifies chains"):
            Bench(model, device_of(depth), depth, strategy=chosen)
        return 0
    if shape in ("shared", "latent") and strategy in ("streaming", "tree-streaming"):
        with pytest.raises(ConfigError, match="needs layers of grouped-query attention"):
            Bench(model, device_of(depth), depth, strategy=chosen)
        return 0
    if strategy == "mtp" and shape != "latent":
        with pytest.raises(ModelError, match="do not contain one"):
            Bench(model, device_of(depth), depth, strategy=chosen)
        return 0
    bench = Bench(
        model,
        device_of(depth, seed=chunk + page),
        depth,
        # Times so short that the queues of a step differ from those of the step before.
        SchedConfig(rows=4, step_tokens=chunk, policy=policy, quantum_ms=0.01, starvation=0.01),
        StateConfig(page_tokens=page, prefix_cache=cache != "off", snapshot_every=2),
        chosen,
        kit=kit_of(shape, *(how or (dtype, providers))),
        tiers=tiers if cache != "off" else "",
    )
    if moody:
        bench.engine.scheduler.pace = Moody(chunk)
    if cache == "warm":
        for i, prompt in enumerate(asked):
            bench.add(("warm", i), prompt, NEW)
        bench.run()
    cuts = {
        (i, child): (7 * i + 5 * child + page) % NEW if resumed else 0 for i in range(len(asked)) for child in range(n)
    }
    for i, prompt in enumerate(asked):
        before = tuple(tuple(expected[i][: cuts[i, child]]) for child in range(n)) if resumed else ()
        bench.add(i, prompt, NEW, n=n, generated=before)
    bench.run(preempt=random.Random(chunk * 31 + page) if preempt else None)
    for i in range(len(asked)):
        for child in range(n):
            assert bench.tokens[i, child] == expected[i][cuts[i, child] :], f"prompt {i}, sample {child}"
            assert bench.finish[i, child] == "length"
    longest = max((group.page_tokens for group in bench.runner.layout.paged), default=0)
    if cache == "warm" and longest < len(asked[0]):  # a small draft model has more tokens in a page than the target
        # With tiers, the device's pool is too small for all prompts, and what comes back in time depends on the clock.
        assert tiers or bench.cached[0] > 0, "the prefix cache was never hit"
    if cache == "off":
        assert not any(bench.cached.values())
    # One token a step leaves no room for guesses; a sample that was nearly complete elsewhere leaves only a few.
    if isinstance(chosen, Guess) and not preempt and chosen.proposed >= FEWEST_GUESSES:
        assert chosen.accepted > 0, "no draft was ever accepted"
    if isinstance(chosen, GuessLookup) and not preempt and sum(bench.engine.totals.drafted) >= FEWEST_GUESSES:
        assert sum(bench.engine.totals.accepted) > 0, "no draft was ever accepted"
    bench.close()
    return max(bench.cached[i] for i in range(len(asked)))


FEW = frozenset(pairwise(SETTINGS, allowed=in_ci, needed=must_meet))


def cases() -> Iterator[object]:
    for case in sorted(FEW, key=str):
        yield pytest.param(*case, id="-".join(map(str, case)))


def other_cases(shape: str, strategy: str) -> Iterator[Case]:
    """The rest of the product for a shape and a strategy: too many for one test each, which pytest would collect in
    every run. Host memory and disk come together here; each alone is among the pairs. The policies take turns."""
    few = {case[:-1] for case in FEW}
    fixed: dict[str, Sequence[object]] = {"shape": (shape,), "strategy": (strategy,), "tiers": ("", "both")}
    turns = itertools.cycle(SETTINGS["policy"])
    product = (SETTINGS | fixed | {"policy": ("",)}).values()
    for case, policy in zip(itertools.product(*product), turns, strict=False):
        if case[:-1] not in few:
            yield (*case[:-1], policy)


@pytest.mark.full
@pytest.mark.parametrize("shape", SETTINGS["shape"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_whole_product_equals_the_naive_loop(shape: str, strategy: str) -> None:
    for case in other_cases(shape, strategy):
        check(*case)  # type: ignore[arg-type]


@pytest.mark.parametrize(",".join(SETTINGS), list(cases()))
def test_greedy_tokens_equal_the_naive_loop(
    shape: str,
    cache: str,
    chunk: int,
    depth: int,
    preempt: bool,
    mates: int,
    n: int,
    page: int,
    strategy: str,
    resumed: bool,
    tiers: str,
    policy: str,
) -> None:
    check(shape, cache, chunk, depth, preempt, mates, n, page, strategy, resumed, tiers, policy)


def check_kernels(shape: str, depth: int, strategies: Sequence[str]) -> None:
    for resumed, tiers in ((False, ""), (True, "both")):
        hits = [
            check(shape, "warm", 16, depth, True, 4, 3, 4, strategy, resumed, tiers, "fcfs", torch.float32, "auto")
            for strategy in strategies
        ]
        assert max(hits) > 0, "the prefix cache was never hit"


@pytest.mark.parametrize("shape", SETTINGS["shape"])
@pytest.mark.parametrize("depth", (0, 1))
def test_kernels_in_float32_equal_the_naive_loop(shape: str, depth: int) -> None:
    check_kernels(shape, depth, [name for name in STRATEGIES if name != "plain" and in_ci(shape, name)])


@pytest.mark.full
@pytest.mark.parametrize("shape", [shape for shape in SETTINGS["shape"] if shape not in EVERY_STRATEGY])
@pytest.mark.parametrize("depth", (0, 1))
def test_kernels_in_float32_equal_the_naive_loop_with_other_strategies(shape: str, depth: int) -> None:
    check_kernels(shape, depth, [name for name in STRATEGIES if not in_ci(shape, name)])


class Moody(Pace):
    """Of a machine that is fast in one step and slow in the next, so that chunks are of any size."""

    def __init__(self, seed: int) -> None:
        super().__init__(bound=0.25, least=1)
        self._moods = random.Random(seed)

    def observe(self, decoding: int, plain: int, scored: int, seconds: float) -> None:
        super().observe(decoding, plain, scored, self._moods.choice((1e-4, 0.01, 0.2, 3.0)))


@pytest.mark.parametrize("shape", SETTINGS["shape"])
@pytest.mark.parametrize("depth", (0, 1))
def test_chunks_cut_by_time_change_no_token(shape: str, depth: int) -> None:
    check(shape, "warm", 64, depth, True, 4, 1, 4, "drafts", moody=True)
    check(shape, "off", 64, depth, False, 4, 1, 4, "plain", False, "", "fcfs", torch.float32, "auto", moody=True)


@pytest.mark.parametrize("page", (1, 4))
def test_a_windowed_prompt_that_ran_in_one_chunk_is_found_again_at_depth_1(page: int) -> None:
    """Its pages leave the window before the step that fills them has settled: they must be published all the same."""
    check("gemma", "warm", 64, 1, False, 0, 1, page, "plain")


def test_the_matrix_notices_a_wrong_token() -> None:
    """A model that differs in one weight must not pass for the same."""
    check("llama", "cold", 7, 0, False, 4, 1, 4, "plain")
    model = model_of("llama", torch.float64, "torch")
    weight = model.blocks[0].feed.down.weight.parts["data"]  # type: ignore[union-attr]
    kept = weight.clone()
    try:
        weight += 0.5
        with pytest.raises(AssertionError):
            check("llama", "cold", 7, 0, False, 4, 1, 4, "plain")
    finally:
        weight.copy_(kept)
