"""How many replicas there are, and what each of them gets."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bankfull.cluster.ray_version import check_version
from bankfull.cluster.sizes import NodeResources, Share, check_room, share_of
from bankfull.errors import ConfigError
from bankfull.fleet.autoscale import (
    DOWN_LOOKS,
    FEWEST_JUDGED,
    MISSED_SHARE,
    UP_LOOKS,
    WINDOW_LOOKS,
    Autoscaler,
    Demand,
)
from bankfull.fleet.replica_range import ReplicaRange


@pytest.mark.parametrize(("text", "bounds"), [("4", (4, 4)), ("1..4", (1, 4)), ("1000", (1000, 1000))])
def test_a_number_or_a_range(text: str, bounds: tuple[int, int]) -> None:
    parsed = ReplicaRange.parse(text)
    assert (parsed.least, parsed.most) == bounds
    assert str(parsed) == text


@pytest.mark.parametrize("text", ["", "0", "-1", "x", "4..1", "0..3", "1..", "1...3", "1001", "1e3", "9" * 30, "²"])
def test_other_numbers_are_named(text: str) -> None:
    with pytest.raises(ConfigError, match="give one from 1 to 1000, or a range such as"):
        ReplicaRange.parse(text)


@pytest.mark.parametrize(
    ("cluster", "most", "wanted", "device", "share"),
    [
        ((8, 0), 4, (None, None), "auto", Share(2.0, 0.0)),
        ((2, 0), 4, (None, None), "auto", Share(1.0, 0.0)),
        ((16, 4), 4, (None, None), "auto", Share(4.0, 1.0)),
        ((16, 4), 4, (None, None), "cpu", Share(4.0, 0.0)),
        ((16, 0), 4, (None, None), "cuda", Share(4.0, 1.0)),
        ((16, 4), 4, (0.5, 0.25), "cuda", Share(0.5, 0.25)),
    ],
)
def test_the_share_of_a_replica(
    cluster: tuple[int, int], most: int, wanted: tuple[float | None, float | None], device: str, share: Share
) -> None:
    assert share_of(*cluster, most, *wanted, device) == share
    assert share.threads >= 1


@pytest.mark.parametrize(
    ("cluster", "most", "wanted", "ranks", "share", "threads"),
    [
        ((8, 0), 2, (None, None), 2, Share(4.0, 0.0, 2), 2),
        ((7, 0), 1, (None, None), 2, Share(6.0, 0.0, 2), 3),
        ((2, 0), 1, (None, None), 4, Share(2.0, 0.0, 4), 1),
        ((16, 8), 2, (None, None), 4, Share(8.0, 4.0, 4), 2),
        ((16, 8), 2, (3.0, 1.0), 2, Share(3.0, 1.0, 2), 1),
    ],
)
def test_ranks_share_what_their_replica_has(
    cluster: tuple[float, float],
    most: int,
    wanted: tuple[float | None, float | None],
    ranks: int,
    share: Share,
    threads: int,
) -> None:
    found = share_of(*cluster, most, *wanted, "auto", ranks)
    assert found == share and found.threads == threads
    assert found.of_rank == Share(share.cpus / ranks, share.gpus / ranks)


def test_a_rank_has_no_use_for_two_gpus() -> None:
    with pytest.raises(ConfigError, match=r"--replica-gpus 4 is more than one GPU for each of the 2 ranks"):
        share_of(16, 8, 1, None, 4.0, "cuda", 2)


def test_ranks_of_a_replica_may_be_on_several_machines() -> None:
    nodes = [NodeResources(2, 1), NodeResources(2, 1)]
    check_room(nodes, Share(4, 2, 2), 1)
    with pytest.raises(ConfigError, match=r"1 replicas with 6 CPUs and 0 GPUs for 2 ranks each do not fit"):
        check_room(nodes, Share(6, 0, 2), 1)
    with pytest.raises(ConfigError, match="--replica-gpus"):
        check_room(nodes, Share(2, 4, 4), 1)


def test_a_cluster_that_is_too_small_is_described() -> None:
    nodes = [NodeResources(3, 0), NodeResources(3, 1)]
    check_room(nodes, Share(1.5, 0), 4)
    with pytest.raises(ConfigError, match=r"6 CPUs and 1 GPUs on 2 machines, room for 2; .*--replica-cpus"):
        check_room(nodes, Share(2, 0), 3)  # one CPU of each machine is of no use
    with pytest.raises(ConfigError, match=r"room for 1; .*--replica-gpus"):
        check_room(nodes, Share(1, 1), 2)


def test_a_lasting_queue_adds_one_replica_at_a_time() -> None:
    scaler, bounds = Autoscaler(), ReplicaRange(1, 3)
    queued = Demand(running=8, waiting=1, rows=8, settled=True)
    decisions = [scaler.decide(bounds, 1, queued) for _ in range(UP_LOOKS)]
    assert decisions == [1] * (UP_LOOKS - 1) + [2]
    loading = Demand(running=8, waiting=9, rows=8, settled=False)
    assert [scaler.decide(bounds, 2, loading) for _ in range(3 * UP_LOOKS)] == [2] * (3 * UP_LOOKS)
    assert [scaler.decide(bounds, 3, queued) for _ in range(3 * UP_LOOKS)] == [3] * (3 * UP_LOOKS)


def test_a_queue_that_comes_and_goes_adds_none() -> None:
    scaler, bounds = Autoscaler(), ReplicaRange(1, 3)
    queued, calm = Demand(8, 1, 8, settled=True), Demand(8, 0, 8, settled=True)
    assert {scaler.decide(bounds, 1, calm if look % UP_LOOKS == 0 else queued) for look in range(100)} == {1}


def test_spare_capacity_removes_a_replica_only_after_a_while() -> None:
    scaler, bounds = Autoscaler(), ReplicaRange(1, 3)
    calm, busy = Demand(4, 0, 16, settled=True), Demand(5, 0, 16, settled=True)
    assert [scaler.decide(bounds, 2, calm) for _ in range(DOWN_LOOKS)] == [2] * (DOWN_LOOKS - 1) + [1]
    assert {scaler.decide(bounds, 2, busy) for _ in range(2 * DOWN_LOOKS)} == {2}, "one replica would be half full"
    assert {scaler.decide(ReplicaRange(2, 3), 2, calm) for _ in range(2 * DOWN_LOOKS)} == {2}


def missing(judged: int = 10, missed: int = 2, running: int = 4) -> Demand:
    """A second without a queue in which some requests are too slow."""
    return Demand(running, 0, 16, settled=True, judged=judged, missed=missed)


def test_missed_objectives_add_a_replica_although_nothing_waits() -> None:
    scaler, bounds = Autoscaler(), ReplicaRange(1, 3)
    decisions = [scaler.decide(bounds, 1, missing()) for _ in range(UP_LOOKS)]
    assert decisions == [1] * (UP_LOOKS - 1) + [2]
    assert scaler.reason == f"{2 * UP_LOOKS} of the last {10 * UP_LOOKS} requests missed a latency objective"
    assert [scaler.decide(bounds, 2, missing()) for _ in range(UP_LOOKS - 1)] == [2] * (UP_LOOKS - 1), (
        "the requests of before say nothing about two replicas"
    )


@pytest.mark.parametrize("demand", [missing(missed=1), missing(judged=1, missed=1, running=0)])
def test_few_missed_objectives_add_none(demand: Demand) -> None:
    scaler, calm = Autoscaler(), missing(judged=0, missed=0)
    looks = [demand, *[calm] * 9] * 20
    assert {scaler.decide(ReplicaRange(1, 3), 1, look) for look in looks} == {1}


def test_a_model_that_is_too_slow_alone_gets_no_replicas() -> None:
    scaler = Autoscaler()
    reasons = []
    for _ in range(100):
        assert scaler.decide(ReplicaRange(1, 4), 2, missing(running=2, missed=10)) == 2
        reasons.append(scaler.reason)
    said = [reason for reason in reasons if reason]
    assert len(said) == 1 and "no replica had more than one request at a time" in said[0]


def test_the_most_replicas_are_named_once() -> None:
    scaler = Autoscaler()
    reasons = [scaler.reason for _ in range(50) if scaler.decide(ReplicaRange(1, 2), 2, missing()) == 2]
    assert len(reasons) == 50 and [reason for reason in reasons if reason] == [
        "10 of the last 50 requests missed a latency objective, but 2 is the most"
    ]


def test_no_replica_is_removed_while_objectives_are_missed() -> None:
    scaler, bounds = Autoscaler(), ReplicaRange(1, 2)
    slow, fast = missing(running=1), missing(running=1, missed=0)
    assert {scaler.decide(bounds, 2, slow) for _ in range(2 * DOWN_LOOKS)} == {2}
    decisions = [scaler.decide(bounds, 2, fast) for _ in range(DOWN_LOOKS + WINDOW_LOOKS)]
    assert decisions[DOWN_LOOKS - 1] == 2 and 1 in decisions


@given(
    st.integers(1, 4),
    st.integers(0, 4),
    st.lists(
        st.tuples(st.integers(1, 400), st.integers(0, 40), st.integers(0, 9), st.integers(0, 20), st.integers(0, 20)),
        min_size=1,
        max_size=20,
    ),
)
@settings(deadline=None)
def test_the_number_stays_within_its_bounds_and_does_not_flap(
    least: int, more: int, phases: list[tuple[int, int, int, int, int]]
) -> None:
    bounds, scaler = ReplicaRange(least, least + more), Autoscaler()
    replicas, added = least, -DOWN_LOOKS
    judged_of: list[tuple[int, int]] = []
    for look, demand in enumerate(
        Demand(running, waiting, 8 * replicas, settled=True, judged=judged, missed=min(judged, missed))
        for looks, running, waiting, judged, missed in phases
        for _ in range(looks)
    ):
        judged_of.append((demand.judged, demand.missed))
        wanted = scaler.decide(bounds, replicas, demand)
        assert bounds.least <= wanted <= bounds.most and abs(wanted - replicas) <= 1
        assert wanted == replicas or scaler.reason
        if wanted > replicas:
            added = look
        if wanted < replicas:
            assert look - added >= DOWN_LOOKS, "a replica was removed right after one was added"
            judged, missed = (sum(part) for part in zip(*judged_of[-WINDOW_LOOKS:], strict=True))
            assert not demand.waiting and (judged < FEWEST_JUDGED or missed <= MISSED_SHARE * judged)
        replicas = wanted


@pytest.mark.parametrize(("replicas", "wanted"), [(1, 2), (2, 2), (4, 4), (7, 4)])
def test_new_bounds_hold_at_once(replicas: int, wanted: int) -> None:
    assert Autoscaler().decide(ReplicaRange(2, 4), replicas, Demand(0, 0, 8, settled=False)) == wanted


@pytest.mark.parametrize("version", ["2.51.2", "1.13", "nonsense"])
def test_versions_of_ray_with_advisories_are_refused(version: str) -> None:
    with pytest.raises(ConfigError, match="known security advisories"):
        check_version(version)


@pytest.mark.parametrize("version", ["2.52.0", "2.60.0", "3.0.0rc1"])
def test_newer_versions_of_ray_are_accepted(version: str) -> None:
    check_version(version)
