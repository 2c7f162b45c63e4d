"""Layouts in plans: step times on several ranks, pipelines, separation, and what is recommended."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bankfull.errors import ConfigError
from bankfull.limits.layout.measured import dims_of
from bankfull.limits.machine.links import Interconnect
from bankfull.limits.meter.closed_form import forms_by_operation
from bankfull.limits.meter.step import StepShape
from bankfull.limits.model.recipe import recipe_of
from bankfull.ops.cost import Rates
from bankfull.plan.configurations import Configuration, meshes
from bankfull.plan.efficiency import assumed
from bankfull.plan.layouts import REACHED, ParallelLayout
from bankfull.plan.planner import DeploymentPlan
from bankfull.plan.separate import PlannedPools, SeparatedSpec, simulate_separated
from bankfull.plan.simulate import simulate
from bankfull.plan.step_times import TERMS, StepTimes, TimeBreakdown
from bankfull.plan.traffic import TraceRequest
from bankfull.ranks.mesh import MeshSpec
from bankfull.traffic.slo import Slo
from bankfull.types import Work
from tests.limits.models import LLAMA
from tests.plan.machines import LINK, LINKS, MACHINE
from tests.plan.test_planner import CARD, MODEL, plan
from tests.plan.test_simulate import poisson, spec

RECIPE = recipe_of(LLAMA, "cuda")
FORMS, DIMS = forms_by_operation(RECIPE.metered()), dims_of(RECIPE)
LINEAR = {**LLAMA, "num_key_value_heads": LLAMA["num_attention_heads"]}
STEPS = st.sampled_from(
    [StepShape.decode(1, 9), StepShape.decode(16, 200), StepShape.prefill(64), StepShape.prefill(8, 4)]
)


def times(mesh: MeshSpec | None, links: Interconnect = LINKS) -> StepTimes:
    layout = None if mesh is None else ParallelLayout(mesh, DIMS, links)
    return StepTimes(FORMS, MACHINE, Rates.flat(1e11), assumed("cuda"), True, layout)


@given(STEPS)
def test_a_mesh_of_one_rank_takes_the_time_of_one_device(step: StepShape) -> None:
    alone, joined = times(None), times(MeshSpec())
    assert joined.likely(step) == pytest.approx(alone.likely(step))
    assert joined.least(step) == pytest.approx(alone.least(step))


@given(
    STEPS, st.sampled_from(["tp=2", "pp=2", "cp=2", "tp=2,pp=2", "tp=2,cp=2", "tp=2,sp=on", "cp=2,sp=ulysses", "ffn=2"])
)
def test_a_step_on_ranks_is_never_faster_than_its_limit_or_than_all_of_them(step: StepShape, text: str) -> None:
    mesh = MeshSpec.parse(text)
    alone, joined = times(None), times(mesh)
    assert 0 < joined.least(step) <= joined.likely(step)
    assert joined.least(step) >= alone.least(step) / mesh.ranks * (1 - 1e-9)


@given(STEPS, st.sampled_from([1, 2, 4]))
def test_a_step_is_no_faster_with_feed_forward_layers_on_ranks_of_their_own(step: StepShape, ranks: int) -> None:
    """The sides of one batch take turns: twice the ranks do the same work in the same time, and rows cross."""
    together, apart = times(MeshSpec(ranks)), times(MeshSpec(ranks, ffn=ranks))
    assert apart.likely(step) > together.likely(step)
    assert apart.spent(step).terms == pytest.approx(together.spent(step).terms)
    assert apart.spent(step).exchange > together.spent(step).exchange


def test_more_feed_forward_ranks_shorten_only_the_feed_forward_layers() -> None:
    step = StepShape.prefill(64)
    found = [float(times(MeshSpec(ffn=ranks)).spent(step).terms.sum()) for ranks in (1, 2, 4)]
    assert found[0] > found[1] > found[2] > found[0] / 2


@given(STEPS, st.sampled_from(["tp=2", "tp=2,pp=2", "cp=2", "ffn=2"]))
def test_a_faster_link_makes_no_step_slower(step: StepShape, text: str) -> None:
    fast = replace(LINK, bytes_per_s=1e12, start_seconds=1e-9, hop_seconds=1e-9)
    mesh = MeshSpec.parse(text)
    assert times(mesh, Interconnect(fast, fast)).likely(step) < times(mesh).likely(step)


def test_two_tensor_ranks_halve_the_work_and_pay_for_their_collectives() -> None:
    step = StepShape.decode(4, 100)
    alone, both = times(None).spent(step), times(MeshSpec(tp=2)).spent(step)
    halved = [n for n, name in enumerate(TERMS) if not name.startswith("other")]
    assert both.terms[halved] == pytest.approx(alone.terms[halved] / 2)
    assert both.overhead == alone.overhead  # each rank has its own host
    layers, hidden = len(DIMS.layers), DIMS.hidden * DIMS.item_bytes
    reduced = (2 * layers + 1) * (LINK.seconds(2, 0) + 4 * hidden / LINK.bytes_per_s / REACHED)
    gathered = LINK.seconds(1, 4 * DIMS.vocab * DIMS.item_bytes / 2 / REACHED)
    assert both.exchange == pytest.approx(reduced + gathered)


@given(st.integers(2, 16), st.integers(1, 64))
def test_the_bubble_of_a_pipeline_is_the_share_of_its_waiting_turns(stages: int, micro: int) -> None:
    layout = replace(_layout(), mesh=MeshSpec(pp=stages))
    assert layout.bubble(micro) == pytest.approx((stages - 1) / (micro + stages - 1))
    assert layout.turns(micro) * stages * (1 - layout.bubble(micro)) == pytest.approx(micro)


def _layout() -> ParallelLayout:
    return ParallelLayout(MeshSpec(pp=2), DIMS, LINKS)


def test_a_pipeline_speeds_up_many_rows_and_not_one() -> None:
    free = replace(LINK, bytes_per_s=1e15, start_seconds=1e-12, hop_seconds=1e-12)
    piped, alone = times(MeshSpec(pp=2), Interconnect(free, free)), times(None)
    one, many = StepShape.decode(1, 100), StepShape.prefill(64, 16)
    assert piped.likely(one) == pytest.approx(alone.likely(one), rel=1e-6)
    assert 0.5 * alone.likely(many) < piped.likely(many) < 0.9 * alone.likely(many)


@given(st.integers(1, 500), st.integers(1, 8), st.sampled_from([(0.25,), (0.125, 0.5)]))
def test_micro_batches_share_tokens_and_read_weights_again(tokens: int, micro: int, shares: tuple[float, ...]) -> None:
    features = np.array([1.0, 1.0, tokens, 4.0, 4.0, 4.0, *(1 - (1 - share) ** tokens for share in shares)])
    made = _layout().micro_batch(features, micro, tokens, shares)
    assert made[0] == made[1] == 1 and made[2] == tokens / micro
    for index, share in enumerate(shares):
        assert made[6 + index] == pytest.approx(1 - (1 - share) ** (tokens / micro))


def test_state_of_copied_key_heads_leaves_room_for_fewer_sequences() -> None:
    """Two ranks hold half each; four ranks of a model with two key heads hold half, too."""
    assert LLAMA["num_key_value_heads"] == 2
    shares = [ParallelLayout(MeshSpec(tp), DIMS, LINKS).state_share for tp in (1, 2, 4)]
    assert shares == [1, 0.5, 0.5]


# -- plans


def test_a_model_too_large_for_one_device_is_planned_over_several() -> None:
    small = replace(CARD, memory=_needed() * 3 // 4)
    found = plan(small, model=MODEL, lossless=True, goal="cost")
    assert found.recommended is not None and found.recommended.configuration.ways > 1
    (command,) = found.recommended.configuration.commands("tiny")
    mesh = found.recommended.configuration.layout
    assert mesh is not None and f"--parallel {mesh.mesh}" in command
    assert any("the weights need" in line for line in found.skipped)
    stored = found.recommended.as_json("tiny")["configuration"]
    assert stored["ways"] == stored["devices"] / stored["replicas"] and stored["parallel"] == str(mesh.mesh)


def _needed() -> int:
    return int(dims_of(recipe_of(MODEL, "cuda")).weight_bytes)


def test_one_layout_is_planned_where_one_is_asked_for() -> None:
    found = plan(CARD, parallel="tp=2", lossless=True)
    assert _layouts(found) == {"tp=2"}
    best = found.recommended
    assert best is not None and best.configuration.dollars_per_hour == 2 * 2.0 * best.configuration.replicas


def test_auto_compares_layouts_with_one_device() -> None:
    found = plan(CARD, parallel="auto", per_replica=2, lossless=True, slo=Slo())
    assert len(_layouts(found)) > 1 and found.recommended is not None


def _layouts(found: DeploymentPlan) -> set[str]:
    return {str(one.configuration.layout and one.configuration.layout.mesh) for one in found.pareto}


def test_a_layout_that_does_not_divide_is_left_out_with_the_reason() -> None:
    found = plan(CARD, parallel="tp=3", lossless=True)
    assert found.recommended is None and any("does not divide" in line for line in found.skipped)
    alone = plan(replace(CARD, links=None), parallel="tp=2", lossless=True)
    assert any("no link" in line for line in alone.skipped)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"parallel": "tp=x"}, "whole number"),
        ({"separate": "prefill=1"}, "engines of both kinds"),
        ({"separate": "decode=2,decode=1"}, "cannot be read"),
        ({"separate": "prefill=0,decode=1"}, "from 1 to 256"),
        ({"per_replica": 0}, "--per-replica 0"),
    ],
)
def test_wrong_options_are_refused_by_one_sentence(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(CARD, **asked)


def test_candidates_of_a_mixture_of_experts_spread_its_experts() -> None:
    assert MeshSpec(tp=2) in meshes(DIMS, 2) and all(mesh.ep == 1 for mesh in meshes(DIMS, 2))
    assert all(mesh.ranks == 4 for mesh in meshes(DIMS, 4))


# -- separation


class Weighed(StepTimes):
    """A step takes a time for itself, and one for each token of a prompt but its last."""

    def __init__(self, step: float, token: float) -> None:
        self.step, self.token = step, token

    def work(self, work: Sequence[Work], spent: TimeBreakdown) -> float:
        seconds = self.step + self.token * sum(one.count - 1 for one in work)
        spent.overhead += seconds
        spent.steps += 1
        return seconds

    def decodes(self, work: Sequence[Work]) -> Iterator[TimeBreakdown]:
        while True:
            yield TimeBreakdown(overhead=self.step, steps=1)


def pair(transfer: float = 0.0, prefill: int = 1, decode: int = 1, token: float = 0.1) -> SeparatedSpec:
    own = replace(spec(rows=8, queue=10**6), times=Weighed(1.0, token))
    return SeparatedSpec(own, own, PlannedPools(prefill, decode), lambda tokens: transfer * tokens)


def test_a_request_is_prefilled_sent_and_decoded() -> None:
    trace = [TraceRequest(0.0, (1, 2, 3, 4, 5), 4)]
    run = simulate_separated(pair(transfer=0.2), trace, "prefix")
    [one] = run.requests
    # 1 + 4 x 0.1 for the prompt, 5 x 0.2 for its state, then three steps of one token.
    assert one.first == pytest.approx(1.4) and one.last == pytest.approx(1.4 + 1.0 + 3 * 1.0)
    assert one.tokens == 4 and one.done and one.longest_gap == pytest.approx(1.0 + 1.0)
    assert run.spent.steps == 4


def test_prompts_of_one_engine_share_its_link() -> None:
    trace = [TraceRequest(0.0, (n, 2, 3, 4, 5), 2) for n in range(2)]
    slow, fast = (simulate_separated(pair(transfer=1.0, prefill=p), trace, "prefix") for p in (1, 2))
    assert max(one.last or math.inf for one in fast.requests) < max(one.last or math.inf for one in slow.requests)


def test_decode_is_not_slowed_by_prompts_where_they_run_apart() -> None:
    trace = poisson(0.1, 60, output=20)
    together = simulate(pair(token=2.0).prefill, trace)
    apart = simulate_separated(pair(token=2.0, prefill=2), trace, "prefix")
    assert max(one.longest_gap for one in apart.requests) < max(one.longest_gap for one in together.requests)
    assert all(one.tokens == 20 and one.done for one in apart.requests)


def test_answers_of_one_token_need_no_decode_engine() -> None:
    run = simulate_separated(pair(), poisson(0.2, 10), "prefix")
    assert all(one.done and one.tokens == 1 for one in run.requests)


def test_a_separation_is_planned_with_its_command_and_cost() -> None:
    found = plan(CARD, separate="prefill=1,decode=2", lossless=True)
    assert found.recommended is not None
    own: Configuration = found.recommended.configuration
    assert own.devices == 3 and own.dollars_per_hour == 6.0
    (command,) = own.commands("tiny")
    assert "--separate prefill=1,decode=2" in command and "--replicas" not in command
    assert own.transfer_seconds(100) == pytest.approx(2e-6 + 100 * _token_bytes() / 1e9)
    both = plan(CARD, separate="auto", lossless=True, slo=Slo(ttft=0.5, tpot=0.1, itl=0.05))
    assert both.recommended is not None


def _token_bytes() -> float:
    return dims_of(recipe_of(MODEL, "cuda")).state_bytes[0]
