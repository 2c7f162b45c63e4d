"""Every lossless feature, alone and in combination, gives the greedy tokens of a plain loop without any cache.

CI runs a covering array: every two values of different settings in `SETTINGS` meet in a case that runs to its end. Left
out are pairs that cannot run, each of which has a test of its own that it is refused (`refusal`), and tiers without a
prefix cache, which have nothing to hold. `make test-full` runs the whole product.

Not dimensions here, and tested elsewhere: sampling and grammars (`tests/test_drafts.py`, `tests/sample`), rounded keys
and values (`tests/test_kv_dtype.py`), layouts over ranks (`tests/parallel`), separate prefill
(`tests/test_separation.py`) and diffusion (`tests/decode/test_diffusion.py`).
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
from bankfull.errors import ConfigError
from bankfull.runtime import naive
from bankfull.sched.pace import Pace
from bankfull.scheduling import POLICIES
from tests.decode.test_eagle import random_eagle, strategy_of
from tests.decode.test_medusa import random_heads
from tests.decode.test_mtp import prediction
from tests.decode.test_streaming import random_streams
from tests.kit import Bench, Guess, GuessLookup, GuessTree, device_of
from tests.quick import covering
from tests.tiny import DEVICE, VOCAB, kit_of, model_of, reference_of

NEW = 12
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
TREES = ("trees", "draft-tree", "medusa", "eagle-tree", "lookahead", "streaming", "tree-streaming")
"""Strategies that propose trees."""


def refusal(shape: object, strategy: object) -> tuple[type[Exception], str] | None:
    """The error and a part of its sentence, where a strategy cannot run with a model of this shape."""
    if shape in RECURRENT and strategy in TREES:
        return ConfigError, "recurrent state verifies chains"
    if shape in ("shared", "latent") and strategy in ("streaming", "tree-streaming"):
        return ConfigError, "needs layers of grouped-query attention"
    if strategy == "mtp" and shape != "latent":
        return ConfigError, "do not contain one"
    return None


def runs(one: str, value: object, other: str, others: object) -> bool:
    """Whether a case with these values of two settings runs and uses both."""
    pair = {one: value, other: others}
    if pair.keys() == {"shape", "strategy"}:
        return refusal(pair["shape"], pair["strategy"]) is None
    return not (pair.get("cache") == "off" and pair.get("tiers", ""))


CANDIDATES = 6
"""Of each case of the covering array, of which the best is taken."""
CHEAP: dict[str, object] = {"chunk": 64, "preempt": False, "mates": 0, "n": 1, "tiers": "", "resumed": True}
"""Values that take little time: preferred where others would bring no new pair."""


def _every(*values: object) -> bool:
    return True


def pairwise(
    settings: dict[str, Sequence[object]],
    seed: int = 0,
    together: Callable[[str, object, str, object], bool] = _every,
) -> list[Case]:
    """A small list of cases in which every two values of different settings meet: greedy, each from a few candidates
    that are themselves built greedily around a pair that has not met. `together`: whether a case may have these values
    of two settings."""
    rng = random.Random(seed)
    names, values = list(settings), list(settings.values())
    columns = sorted(
        itertools.combinations(range(len(values)), 2), key=lambda c: -len(values[c[0]]) * len(values[c[1]])
    )
    able = {
        (i, a, j, b): None
        for i, j in columns
        for a in values[i]
        for b in values[j]
        if together(names[i], a, names[j], b)
    }
    missing, cases = dict(able), list[Case]()

    def pair(i: int, a: object, j: int, b: object) -> tuple[int, object, int, object]:
        return (i, a, j, b) if i < j else (j, b, i, a)

    def grown(first: tuple[int, object, int, object]) -> tuple[int, Case]:
        chosen = {first[0]: first[1], first[2]: first[3]}
        gain = 1
        for column in rng.sample(others := [c for c in range(len(values)) if c not in chosen], len(others)):
            found: tuple[int, float, object] = (-1, 0.0, None)
            for value in values[column]:
                pairs = [pair(column, value, other, theirs) for other, theirs in chosen.items()]
                if all(one in able for one in pairs):
                    cheap = (value == CHEAP.get(names[column])) * rng.random()
                    found = max(found, (sum(one in missing for one in pairs), cheap, value), key=lambda f: f[:2])
            assert found[0] >= 0, "a case that cannot be completed"
            chosen[column] = found[2]
            gain += found[0]
        return gain, tuple(chosen[column] for column in range(len(values)))

    while missing:
        _, best = max((grown(next(iter(missing))) for _ in range(CANDIDATES)), key=lambda one: one[0])
        for i, j in columns:
            missing.pop((i, best[i], j, best[j]), None)
        cases.append(best)
    return cases


def test_every_pair_of_settings_that_can_run_meets_in_a_case_that_runs() -> None:
    names, values = list(SETTINGS), list(SETTINGS.values())
    assert all(refusal(case[names.index("shape")], case[names.index("strategy")]) is None for case in FEW)
    for i, j in itertools.combinations(range(len(values)), 2):
        pairs = {pair for pair in itertools.product(values[i], values[j]) if runs(names[i], pair[0], names[j], pair[1])}
        assert {(case[i], case[j]) for case in FEW} == pairs


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_cannot_run_is_refused_in_one_sentence(strategy: str) -> None:
    for shape in map(str, SETTINGS["shape"]):
        if (refused := refusal(shape, strategy)) is not None:
            with pytest.raises(refused[0], match=refused[1]):
                Bench(model_of(shape, torch.float64, "torch"), device_of(0), 0, strategy=STRATEGIES[strategy]([[1]], 7))


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
        # With tiers, the device's pool is too small for several prompts, and what comes back in time depends on the
        # clock. One prompt stays there.
        assert (tiers and mates) or bench.cached[0] > 0, "the prefix cache was never hit"
    if cache == "off":
        assert not any(bench.cached.values())
    # One token a step leaves no room for guesses; a sample that was nearly complete elsewhere leaves only a few.
    if isinstance(chosen, Guess) and not preempt and chosen.proposed >= FEWEST_GUESSES:
        assert chosen.accepted > 0, "no draft was ever accepted"
    if isinstance(chosen, GuessLookup) and not preempt and sum(bench.engine.totals.drafted) >= FEWEST_GUESSES:
        assert sum(bench.engine.totals.accepted) > 0, "no draft was ever accepted"
    bench.close()
    return max(bench.cached[i] for i in range(len(asked)))


FEW = frozenset(pairwise(SETTINGS, together=runs))


def cases() -> Iterator[object]:
    for case in sorted(FEW, key=str):
        yield pytest.param(*case, id="-".join(map(str, case)))


def other_cases(shape: str, strategy: str) -> Iterator[Case]:
    """The rest of the product for a shape and a strategy: too many for one test each, which pytest would collect in
    every run. Host memory and disk come together here; each alone is among the pairs. The policies take turns."""
    few = {case[:-1] for case in FEW}
    fixed: dict[str, Sequence[object]] = {"shape": (shape,), "strategy": (strategy,), "tiers": ("", "both")}
    if refusal(shape, strategy) is not None:
        return
    turns = itertools.cycle(SETTINGS["policy"])
    product = (SETTINGS | fixed | {"policy": ("",)}).values()
    for case, policy in zip(itertools.product(*product), turns, strict=False):
        if case[:-1] not in few and (case[1] != "off" or not case[10]):
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


PAIRS = [
    (shape, strategy)
    for shape, strategy in itertools.product(map(str, SETTINGS["shape"]), STRATEGIES)
    if strategy != "plain" and refusal(shape, strategy) is None
]
IN_CI = covering(PAIRS, 1)
"""Each shape and each strategy once: all drafts are verified alike, however they are made."""


@pytest.mark.parametrize("depth", (0, 1))
@pytest.mark.parametrize(
    ("shape", "strategy"),
    [pytest.param(*pair, marks=() if at in IN_CI else pytest.mark.full) for at, pair in enumerate(PAIRS)],
)
def test_kernels_in_float32_equal_the_naive_loop(shape: str, strategy: str, depth: int) -> None:
    for resumed, tiers in ((False, ""), (True, "both")):
        check(shape, "warm", 16, depth, True, 4, 3, 4, strategy, resumed, tiers, "fcfs", torch.float32, "auto")


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
        with torch.inference_mode():  # the model was perhaps built under it
            weight += 0.5
        with pytest.raises(AssertionError):
            check("llama", "cold", 7, 0, False, 4, 1, 4, "plain")
    finally:
        with torch.inference_mode():
            weight.copy_(kept)
