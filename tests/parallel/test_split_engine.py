"""An engine over several ranks gives the tokens of one process, whatever else is on: part of the exactness matrix."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from bankfull.config import SchedConfig, StateConfig
from bankfull.errors import ConfigError
from bankfull.layers.build import Build
from bankfull.layers.expert_ranks import ExpertRanks
from bankfull.layers.experts import Experts, ExpertsShape, RoutingRule
from bankfull.mesh import MeshSpec
from bankfull.ops import kit_for
from bankfull.parallel import hot
from bankfull.runtime import naive
from bankfull.runtime.device import open_device
from bankfull.sample.params import SamplingParams
from bankfull.types import StepPlan, Work
from tests.kit import GuessLookup
from tests.parallel.split_bench import SplitBench
from tests.parallel.test_dispatch import HIDDEN, INNER, Drawn
from tests.parallel.threads import Meeting, ThreadRank
from tests.tiny import reference_of

SHAPES = [
    "llama",
    "gemma",
    "shared",
    "latent",
    "experts",
    "mamba",
    "mamba2",
    "hybrid",
    "lightning",
    "delta",
    "s4",
    "based",
    "sparse",
]
CPU = torch.device("cpu")


def prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    shared = [rng.randrange(3, 90) for _ in range(21)]
    return [shared + [rng.randrange(3, 90) for _ in range(rng.randrange(1, 9))] for _ in range(3)]


MESHES = ["tp=2", "pp=2", "pp=3", "tp=2,pp=2"]
APART = ["ffn=1", "tp=2,ffn=2", "pp=2,ffn=1"]
ONE_STAGE = ("shared",)
"""Models whose layers share keys and values across the borders of stages."""
NO_FEEDS = ("mamba", "mamba2")
"""Models without feed-forward layers."""
QUICK = ("llama", "experts", "hybrid")
FED = [
    pytest.param(shape, marks=[] if shape in QUICK else pytest.mark.full) for shape in SHAPES if shape not in NO_FEEDS
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("cached", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_give_the_tokens_of_a_plain_loop(shape: str, mesh: str, cached: bool) -> None:
    check_tokens(shape, mesh, cached)


@pytest.mark.covering(1)
@pytest.mark.parametrize("cached", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("mesh", APART)
@pytest.mark.parametrize("shape", FED)
def test_feed_forward_ranks_give_the_tokens_of_a_plain_loop(shape: str, mesh: str, cached: bool) -> None:
    check_tokens(shape, mesh, cached)


def check_tokens(shape: str, mesh: str, cached: bool) -> None:
    if "pp" in mesh and shape in ONE_STAGE:
        pytest.skip("tests/parallel/test_stages.py: such layers stay in one stage")
    sched = SchedConfig(rows=3, step_tokens=7 if cached else 64)
    with SplitBench(shape, mesh, sched=sched, state=StateConfig(page_tokens=4, prefix_cache=cached)) as bench:
        asked = prompts(1)
        for name, prompt in enumerate(asked):
            bench.add(name, prompt, 12)
        bench.run(preempt=random.Random(3))
        for name, prompt in enumerate(asked):
            expected, margins = naive.generate(reference_of(shape), prompt, 12, CPU)
            assert min(margins) > 1e-4, "the reference cannot tell the best token from the second"
            assert bench.tokens[name, 0] == expected


@pytest.mark.parametrize("mesh", [*MESHES, "tp=2,ffn=2"])
def test_drafts_that_the_host_finds_are_verified_on_every_rank(mesh: str) -> None:
    prompt = [5, 6, 7, 8] * 6
    expected, _ = naive.generate(reference_of("llama"), prompt, 16, CPU)
    lookup = GuessLookup([prompt + expected])
    with SplitBench("llama", mesh, sched=SchedConfig(rows=2, step_tokens=32), lookup=lookup) as bench:
        bench.add("a", prompt, 16)
        bench.run()
        assert bench.tokens["a", 0] == expected
        assert sum(bench.engine.totals.accepted) > 0


def test_sampled_tokens_and_masks_are_those_of_one_rank() -> None:
    params = SamplingParams(temperature=0.9, top_k=20, top_p=0.9, logit_bias={4: 2.0}, repetition_penalty=1.2, seed=7)
    found = []
    for mesh in ("tp=1", *MESHES, "tp=2,ffn=2"):
        with SplitBench("llama", mesh, sched=SchedConfig(rows=2, step_tokens=32)) as bench:
            bench.add("a", [9, 8, 7, 6, 5], 20, params=params, seed=7)
            bench.run()
            found.append(bench.tokens["a", 0])
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize("mesh", ["tp=2,ep=2,hot=2", "ffn=2,ep=2,hot=1", "tp=2,pp=2,ep=2,hot=1"])
def test_hot_experts_are_copied_between_two_steps_and_tokens_stay_the_same(
    mesh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hot, "COUNTED_TOKENS", 40)
    made = SplitBench("experts", mesh, sched=SchedConfig(rows=3, step_tokens=16))
    layers = [layer for ranks in made.experts if ranks is not None for layer in ranks.layers]
    with made as bench:
        asked = prompts(5)
        for name, prompt in enumerate(asked):
            bench.add(name, prompt, 12)
        assert all(layer.spread.hot == () for layer in layers)  # type: ignore[attr-defined]
        bench.run()
        for name, prompt in enumerate(asked):
            expected, margins = naive.generate(reference_of("experts"), prompt, 12, CPU)
            assert min(margins) > 1e-4, "the reference cannot tell the best token from the second"
            assert bench.tokens[name, 0] == expected
    assert made.followers.hot is None, "rank 0 decides once"
    copies = MeshSpec.parse(mesh).hot
    for layer in layers:
        assert isinstance(layer, Experts) and layer.spread is not None and layer._counts is None
        assert len(layer.spread.hot) == copies and set(layer.spread.hot) <= set(layer.spread.held)
    of_ranks = [[layer.spread.hot for layer in ranks.layers] for ranks in made.experts if ranks is not None]  # type: ignore[attr-defined]
    assert all(one == other for one, other in pairwise(of_ranks[: MeshSpec.parse(mesh).feed_ranks]))


def test_hot_experts_wait_for_enough_tokens_and_need_others_beside_them() -> None:
    ranks = [ExpertRanks(ThreadRank(Meeting(2), 2, index)) for index in range(2)]
    rule, device = RoutingRule(4, 2), open_device("cpu")
    layer = Experts(
        Build(Drawn(4), kit_for("cpu", "torch"), torch.float32, CPU, experts=ranks[0]),
        ExpertsShape(HIDDEN, INNER, rule),
    )
    assert ranks[0].layers == [layer] and not ranks[1].layers
    assert layer.expert_bytes == 3 * 4 * HIDDEN * INNER
    assert hot.bytes_of_copies(ranks[0].layers, 1, 2) == (1 + 2) * layer.expert_bytes
    with pytest.raises(ConfigError, match="only 4; use hot=3 or less"):
        hot.HotExperts(ranks[0].layers, 4, device)
    made, half = hot.HotExperts(ranks[0].layers, 1, device), hot.COUNTED_TOKENS // 2
    plan = StepPlan(0, [Work(0, 0, half)])
    assert [made.due(plan) for _ in range(3)] == [False, False, True]
