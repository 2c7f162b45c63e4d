"""A simulated fleet: strides equal single steps, every request ends once, and failures lose nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bankfull.bench.load.arrivals import Arrivals
from bankfull.bench.load.slo import Slo
from bankfull.config import SchedConfig, StateConfig
from bankfull.fleet.replica_range import ReplicaRange
from bankfull.fleet.routing import POLICIES
from bankfull.limits.meter.step import StepShape
from bankfull.plan.day import SyntheticDay
from bankfull.plan.fleet import FleetOptions, FleetSimulation
from bankfull.plan.fleet_ledger import COLUMNS
from bankfull.plan.fleet_report import BINS, FleetOutcome, fleet_charts, fleet_table, stacked_svg
from bankfull.plan.simulate import ReplicaSpec
from bankfull.plan.step_times import StepTimes, TimeBreakdown
from bankfull.plan.traffic import TrafficSpec, UniformLengths
from bankfull.runtime.memory import Sizes
from bankfull.state.spec import Paged, TensorSpec, layout_of
from bankfull.types import Work

LAYOUT = layout_of([(Paged((TensorSpec("k", (1, 4), "float32"),)),)], 4)
CONTEXT = 400


class Affine(StepTimes):
    """A fixed time per step, per token and per token of context."""

    def __init__(self) -> None:
        pass

    def likely(self, step: StepShape) -> float:
        return 0.01 + 0.0007 * step.tokens + 1e-5 * sum(step.lengths)

    def work(self, work: Sequence[Work], spent: TimeBreakdown) -> float:
        return self.likely(StepShape.of(work))


def spec(rows: int = 4, frames: int = 300, step_ms: float = 0.0) -> ReplicaSpec:
    sched = SchedConfig(rows=rows, step_tokens=64, step_ms=step_ms, policy="priority")
    return ReplicaSpec(LAYOUT, Sizes(frames, 0, rows, CONTEXT), sched, StateConfig(page_tokens=4), 0, Affine())


def day(requests: int, rate: float, seed: int, shared: int = 10) -> SyntheticDay:
    traffic = TrafficSpec(Arrivals(rate), UniformLengths(12, 90), UniformLengths(2, 60), shared)
    return SyntheticDay(traffic, requests, CONTEXT, seed)


def simulated(options: FleetOptions, kind: ReplicaSpec, traffic: SyntheticDay) -> FleetSimulation:
    simulation = FleetSimulation(kind, traffic, options)
    simulation.run()
    return simulation


EVENTS = st.builds(
    FleetOptions,
    replicas=st.sampled_from([ReplicaRange(1, 1), ReplicaRange(3, 3), ReplicaRange(2, 6), ReplicaRange(30, 30)]),
    routing=st.sampled_from(sorted(POLICIES)),
    start_seconds=st.sampled_from([0.5, 3.0]),
    mtbf_hours=st.none() | st.sampled_from([30.0, 100.0]),
    node_size=st.just(2),
    update_at=st.none() | st.just(0.3),
    update_share=st.just(0.3),
    grace=st.sampled_from([0.2, 3.0]),
    seed=st.integers(0, 1000),
)
KINDS = st.builds(
    spec, rows=st.sampled_from([1, 4]), frames=st.sampled_from([110, 300]), step_ms=st.sampled_from([0.0, 40.0])
)


@settings(max_examples=20, deadline=None)
@given(EVENTS, KINDS, st.integers(0, 1000), st.sampled_from([2.0, 8.0]))
def test_strides_equal_single_steps(options: FleetOptions, kind: ReplicaSpec, seed: int, rate: float) -> None:
    """Identical times, tokens and counters, to the last bit."""
    fast = simulated(options, kind, day(40, rate, seed))
    slow = simulated(replace(options, stepped=True), kind, day(40, rate, seed))
    for name in COLUMNS:
        assert np.array_equal(fast.ledger.column(name), slow.ledger.column(name)), name
    for counter in ("ended", "refused", "lost", "resumed", "recomputed", "failed", "updated", "failures", "updates"):
        assert getattr(fast.ledger, counter) == getattr(slow.ledger, counter), counter
    assert (fast.computed_tokens, fast.most_rows, fast.preemptions) == (
        slow.computed_tokens,
        slow.most_rows,
        slow.preemptions,
    )


@settings(max_examples=20, deadline=None)
@given(EVENTS, KINDS, st.integers(0, 1000), st.sampled_from([2.0, 8.0]))
def test_every_request_ends_once_and_nothing_is_lost(
    options: FleetOptions, kind: ReplicaSpec, seed: int, rate: float
) -> None:
    found = simulated(options, kind, day(40, rate, seed))
    ledger = found.ledger
    assert ledger.ended + ledger.refused + ledger.lost == 40
    assert not found.active and all(not member.requests and not member.inbox for member in found.members)
    if options.mtbf_hours is None and options.replicas.least > 1:
        assert ledger.lost == 0
    assert found.most_rows <= kind.sizes.rows
    assert np.all(ledger.column("arrived") < ledger.column("first"))
    assert np.all(ledger.column("first") <= ledger.column("last"))
    assert np.all(ledger.column("cached") < ledger.column("prompt"))
    # Tokens are conserved: each is computed once, and those of a lost or preempted state again.
    needed = (ledger.column("prompt") - ledger.column("cached") + ledger.column("output") - 1).sum()
    if not (ledger.resumed or found.preemptions or ledger.lost or ledger.failed):
        assert found.computed_tokens == needed
    elif not ledger.lost:
        assert found.computed_tokens >= needed


def test_failures_and_updates_resume_streams_and_lose_none() -> None:
    options = FleetOptions(
        ReplicaRange(6, 6), start_seconds=2.0, mtbf_hours=5.0, node_size=2, update_at=0.4, grace=0.5, seed=3
    )
    # Failures fall into the day only, so that it must be busy for them to hit many streams.
    ledger = simulated(options, spec(), day(2000, 50.0, 1)).ledger
    assert ledger.failed > 5 and ledger.updated >= 5 and len(ledger.updates) == 2
    assert ledger.resumed > 20 and ledger.recomputed > ledger.resumed
    assert (ledger.lost, ledger.ended + ledger.refused) == (0, 2000)


def test_the_autoscaler_adds_replicas_for_a_queue() -> None:
    options = FleetOptions(ReplicaRange(1, 6), start_seconds=1.0)
    found = simulated(options, replace(spec(rows=2), queue=1000), day(900, 20.0, 1))
    edges = np.linspace(0, found.ledger.seconds, 9)
    ready = found.ledger.ready_replicas(edges)
    assert ready[0] < 1.5 < ready.max(), "a replica is added after five seconds with a queue"
    paid = found.ledger.paid_seconds(np.array([0.0, found.ledger.seconds]))
    assert found.ledger.seconds < paid[0] < 6 * found.ledger.seconds


def test_prefix_routing_finds_more_in_the_caches_than_round_robin() -> None:
    hits = {}
    for policy in ("prefix", "round-robin"):
        ledger = simulated(FleetOptions(ReplicaRange(30, 30), policy), spec(), day(1500, 20.0, 2, 0)).ledger
        hits[policy] = ledger.column("cached").sum() / ledger.column("prompt").sum()
    assert hits["prefix"] > 2 * hits["round-robin"]


def test_a_day_is_reproducible_and_has_the_wanted_shape() -> None:
    one, two, other = (list(day(2000, 4.0, seed).conversations()) for seed in (5, 5, 6))
    assert one == two != other
    assert sum(len(conversation.turns) for conversation in one) == 2000
    begins = [conversation.begins for conversation in one]
    assert begins == sorted(begins) and begins[0] >= 0 and begins[-1] <= 500
    middle = sum(125 < begin < 375 for begin in begins)
    assert middle > 1.5 * (len(begins) - middle), "more at noon than at night"


def test_too_many_requests_are_refused_in_one_sentence() -> None:
    with pytest.raises(Exception, match="--requests 0 is out of range"):
        day(0, 1.0, 0)


def test_a_day_is_reported_as_table_json_and_picture() -> None:
    found = simulated(FleetOptions(ReplicaRange(3, 3), mtbf_hours=50.0, update_at=0.5), spec(), day(120, 6.0, 1))
    outcome = FleetOutcome("prefix", "3", found.ledger, Slo(ttft=5.0), 2.0)
    told = outcome.as_json()
    assert (told["requests"], told["lost"]) == (120, 0)
    assert told["replica_hours"] == pytest.approx(3 * 20 / 3600) and told["dollars_per_million"] > 0
    assert 0 < told["hit_rate"] < 1 and len(told["curves"]["goodput_per_s"]) == BINS
    assert fleet_table([outcome], "a day").row_count == 1
    picture = stacked_svg(fleet_charts([outcome], "a day"))
    for text in ("goodput", "hit rate", "replicas ready", "output tokens", "update begins"):
        assert text in picture
