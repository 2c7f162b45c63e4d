"""Experts that are used most are copied to every rank, between two steps."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from bankfull.config import SchedConfig
from bankfull.errors import ConfigError
from bankfull.layers.build import Build
from bankfull.layers.experts import ExpertsShape, RoutingRule
from bankfull.ops import kit_for
from bankfull.parallel import hot
from bankfull.ranks.expert_ranks import ExpertRanks
from bankfull.ranks.mesh import MeshSpec
from bankfull.runtime import naive
from bankfull.runtime.device import open_device
from bankfull.spread.experts import SpreadExperts, mixture
from bankfull.types import StepPlan, Work
from tests.parallel.split_bench import SplitBench
from tests.parallel.test_dispatch import HIDDEN, INNER, Drawn
from tests.parallel.test_split_engine import CPU, prompts
from tests.parallel.threads import Meeting, ThreadRank
from tests.tiny import reference_of


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
        assert isinstance(layer, SpreadExperts) and layer._counts is None
        assert len(layer.spread.hot) == copies and set(layer.spread.hot) <= set(layer.spread.held)
    of_ranks = [[layer.spread.hot for layer in ranks.layers] for ranks in made.experts if ranks is not None]  # type: ignore[attr-defined]
    assert all(one == other for one, other in pairwise(of_ranks[: MeshSpec.parse(mesh).feed_ranks]))


def test_hot_experts_wait_for_enough_tokens_and_need_others_beside_them() -> None:
    ranks = [ExpertRanks(ThreadRank(Meeting(2), 2, index)) for index in range(2)]
    rule, device = RoutingRule(4, 2), open_device("cpu")
    layer = mixture(
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
