"""A simulated fleet: strides equal single steps, every request ends once, and failures lose nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bankfull.config import SchedConfig, StateConfig
from bankfull.fleet.replica_range import ReplicaRange
from bankfull.fleet.routing import POLICIES
from bankfull.limits.meter.step import StepShape
from bankfull.plan.day import Day, DayConversation, RecordedDay, SyntheticDay
from bankfull.plan.day_content import Content
from bankfull.plan.fleet import FleetSimulation
from bankfull.plan.fleet_ledger import COLUMNS, FleetLedger
from bankfull.plan.fleet_options import FleetOptions
from bankfull.plan.fleet_report import BINS, FleetOutcome, fleet_charts, fleet_table, stacked_svg
from bankfull.plan.fleet_requests import FleetConversation, FleetRequest
from bankfull.plan.simulate import ReplicaSpec
from bankfull.plan.step_times import StepTimes, TimeBreakdown
from bankfull.plan.traffic import TrafficSpec, UniformLengths
from bankfull.runtime.memory import Sizes
from bankfull.scheduling import POLICIES as SCHEDULING
from bankfull.state.prefix import Chain
from bankfull.state.spec import Paged, TensorSpec, layout_of
from bankfull.traffic.arrivals import Arrivals
from bankfull.traffic.slo import Slo
from bankfull.types import Work
from tests.quick import examples

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


def spec(rows: int = 4, frames: int = 300, step_ms: float = 0.0, policy: str = "priority") -> ReplicaSpec:
    sched = SchedConfig(rows=rows, step_tokens=64, step_ms=step_ms, policy=policy, quantum_ms=25.0, starvation=0.4)
    return ReplicaSpec(LAYOUT, Sizes(frames, 0, rows, CONTEXT), sched, StateConfig(page_tokens=4), 0, Affine())


def day(requests: int, rate: float, seed: int, shared: int = 10) -> SyntheticDay:
    traffic = TrafficSpec(Arrivals(rate), UniformLengths(12, 90), UniformLengths(2, 60), shared)
    return SyntheticDay(traffic, requests, CONTEXT, seed)


def simulated(options: FleetOptions, kind: ReplicaSpec, traffic: Day) -> FleetSimulation:
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
    slo=st.sampled_from([Slo(), Slo(ttft=0.1, itl=0.03)]),
    seed=st.integers(0, 1000),
)
KINDS = st.builds(
    spec,
    rows=st.sampled_from([1, 4]),
    frames=st.sampled_from([110, 300]),
    step_ms=st.sampled_from([0.0, 40.0]),
    policy=st.sampled_from(sorted(SCHEDULING)),
)


@examples(20)
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


@examples(20)
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


def recorded(folder: Path, *requests: tuple[float, int, int, list[int]]) -> RecordedDay:
    """A day from (seconds, prompt tokens, output tokens, ids of blocks of 512 tokens)."""
    lines = [
        {"timestamp": 1e3 * at, "input_length": prompt, "output_length": output, "hash_ids": ids}
        for at, prompt, output, ids in requests
    ]
    path = folder / "day.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return RecordedDay(path, len(lines), 4096)


def test_a_recorded_day_shares_the_blocks_that_the_trace_names(tmp_path: Path) -> None:
    """Equal ids are equal tokens only after equal ids. Named and hashed blocks give the same day."""
    given = recorded(
        tmp_path,
        (0.0, 1030, 4, [7, 8]),
        (9.0, 1100, 4, [7, 8]),
        (18.0, 1100, 4, [6, 8]),
        (27.0, 600, 4, [7]),
        (36.0, 1024, 1, [7, 8]),
    )
    kind = replace(spec(frames=2000), sizes=Sizes(2000, 0, 4, 4096))
    found = [simulated(FleetOptions(ReplicaRange(1, 1), stepped=stepped), kind, given) for stepped in (False, True)]
    for ledger in (one.ledger for one in found):
        assert ledger.column("cached").tolist() == [0, 1024, 0, 512, 1020], "the last token always runs"
        assert ledger.column("prompt").tolist() == [1030, 1100, 1100, 600, 1024]
    assert np.array_equal(found[0].ledger.column("last"), found[1].ledger.column("last"))


def test_the_times_of_two_requests_by_hand(tmp_path: Path) -> None:
    """One replica: the second prompt arrives while the first one decodes, and both then decode together."""
    given = recorded(tmp_path, (0.0, 20, 4, []), (0.03, 40, 2, []))
    kind = replace(spec(), sizes=Sizes(300, 0, 4, 4096))
    ledger = simulated(FleetOptions(ReplicaRange(1, 1)), kind, given).ledger
    prompt = 0.01 + 0.0007 * 20 + 1e-5 * 20
    decode = 0.01 + 0.0007 + 1e-5 * 21
    # 0.03 s lies within the second step: the second prompt waits for its end, and shares the third one.
    both = 0.01 + 0.0007 * 41 + 1e-5 * (22 + 40)
    last = 0.01 + 0.0007 * 2 + 1e-5 * (23 + 41)
    ends = np.cumsum([prompt, decode, both, last])
    assert sorted(ledger.column("arrived").tolist()) == [0.0, 0.03]
    rows = {
        int(prompt): {name: float(ledger.column(name)[at]) for name in ("first", "last", "gap")}
        for at, prompt in enumerate(ledger.column("prompt"))
    }
    near = {"rel": 2e-3}  # the table of decode times interpolates from a context of one token
    assert rows[20]["first"] == pytest.approx(ends[0], **near) and rows[20]["last"] == pytest.approx(ends[3], **near)
    assert rows[20]["gap"] == pytest.approx(both, **near)
    assert rows[40]["first"] == pytest.approx(ends[2], **near) and rows[40]["last"] == pytest.approx(ends[3], **near)
    assert rows[40]["gap"] == pytest.approx(last, **near)


def test_goodput_cost_and_hit_rate_by_hand() -> None:
    """Two replicas over 100 seconds, the second one for half of them, at 36 dollars per hour each."""
    ledger = FleetLedger(4, 100.0)
    ledger.paid(0.0, 1)
    ledger.paid(0.0, 1)
    ledger.paid(50.0, -1)
    talk = FleetConversation(DayConversation(0.0, (), []), Content((), 1), Chain(b"", 4))
    for arrived, first, last, gap, prompt, cached, output in (
        (10.0, 10.5, 12.5, 0.4, 100, 0, 11),  # meets all: TTFT 0.5 s, TPOT 0.2 s
        (20.0, 21.5, 22.0, 0.1, 100, 80, 6),  # TTFT 1.5 s
        (30.0, 30.5, 33.5, 2.0, 100, 40, 31),  # TPOT 0.1 s, but a gap of 2 s
        (99.0, 99.5, 101.5, 0.4, 100, 80, 11),  # meets all, and ends after the day
    ):
        one = FleetRequest(1, talk, prompt, output, arrived, 0, first, last, gap, cached)
        ledger.end(one, last)
    ledger.refuse(40.0)
    met = {
        Slo(ttft=1.0): 3,
        Slo(itl=1.0): 3,
        Slo(ttft=1.0, itl=1.0): 2,
        Slo(tpot=0.15): 2,
        Slo(e2e=2.5): 3,
        Slo(): 4,
    }
    for slo, count in met.items():
        outcome = FleetOutcome("prefix", "2", ledger, slo, 36.0)
        assert outcome.goodput == pytest.approx(count / 100) and outcome.attainment == pytest.approx(count / 5), slo
    assert outcome.hit_rate == pytest.approx(200 / 400)
    assert outcome.replica_hours == pytest.approx(150 / 3600)
    # 1.5 dollars for the 48 output tokens of requests that ended during the day.
    assert outcome.dollars_per_million == pytest.approx(1.5 / 48 * 1e6)
    assert outcome.as_json()["itl_p99"] == pytest.approx(np.quantile([0.4, 0.1, 2.0, 0.4], 0.99))


def test_the_autoscaler_adds_replicas_for_missed_objectives() -> None:
    """Without a queue: rows are plenty, but the gaps between tokens grow with them."""
    ready = {}
    for slo in (Slo(), Slo(itl=0.025)):
        options = FleetOptions(ReplicaRange(1, 4), start_seconds=1.0, slo=slo)
        ledger = simulated(options, replace(spec(rows=64, frames=3000), queue=1000), day(900, 20.0, 1)).ledger
        ready[slo] = ledger.ready_replicas(np.linspace(0, ledger.seconds, 9)).max()
    assert ready[Slo()] < 1.5 < ready[Slo(itl=0.025)]


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
