"""How many replicas there are, and what each of them gets."""

from __future__ import annotations

import pytest

from bankfull.cluster.ray_version import check_version
from bankfull.cluster.sizes import NodeResources, Share, check_room, share_of
from bankfull.errors import ConfigError
from bankfull.fleet.autoscale import DOWN_LOOKS, UP_LOOKS, Autoscaler, Demand
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
