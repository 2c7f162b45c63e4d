"""The cluster manager, with Ray replaced: where its replicas are, and which nodes it refuses."""

from __future__ import annotations

import socket
from collections.abc import Collection
from contextlib import suppress
from importlib import metadata
from typing import Any

import pytest

from bankfull.cluster import manager as manager_module
from bankfull.cluster.manager import ClusterManager
from bankfull.cluster.messages import (
    CannotAdd,
    FromManager,
    RefusedNodes,
    ReplicaLost,
    ReplicaPlaced,
    StartCluster,
    from_manager,
)
from bankfull.cluster.ray_session import RaySession
from bankfull.cluster.sizes import Share
from bankfull.errors import ConfigError

Answer = dict[str, Any] | Exception


class FakeActor:
    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.status = self
        self.answer: Answer | None = None
        """Where it answers otherwise than the others."""
        self.told: tuple[Any, ...] = ()
        """What the last question said."""

    def remote(self, *told: Any) -> FakeActor:
        """The question where it is."""
        self.told = told
        return self


class FakeRay:
    """In the place of Ray: every question has been answered already, by a status or an error."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.created: list[FakeActor] = []
        self.killed: list[FakeActor] = []

    def wait(self, asked: list[Any], **how: Any) -> tuple[list[Any], list[Any]]:
        return asked, []

    def get(self, asked: FakeActor) -> dict[str, Any]:
        answer = asked.answer or self.answer
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self, actor: FakeActor) -> None:
        self.killed.append(actor)

    def remote(self, kind: type) -> FakeRay:
        return self

    def options(self, **options: Any) -> Any:
        def create(*parts: str) -> FakeActor:
            self.created.append(FakeActor(options))
            return self.created[-1]

        return type("Kind", (), {"remote": staticmethod(create)})


class FakeSession(RaySession):
    """A Ray cluster of machines with one CPU each."""

    def __init__(self, ray: FakeRay, machines: dict[str, str]) -> None:
        self.ray, self.local, self.machines = ray, False, machines
        self.groups: list[tuple[int, tuple[str, ...]]] = []
        """Bundles of each placement group, and the nodes that it avoids."""
        self.released: list[int] = []

    def reserve(self, share: Share, without: Collection[str] = ()) -> Any:
        self.groups.append((share.ranks, tuple(without)))
        return len(self.groups) - 1

    def bundle(self, group: Any, number: int) -> Any:
        return (group, number)

    def release(self, group: Any) -> None:
        self.released.append(group)

    def close(self) -> None:
        pass

    def _alive(self) -> list[dict[str, Any]]:
        return [
            {"NodeID": node, "NodeManagerAddress": host, "Resources": {"CPU": 1.0}}
            for node, host in self.machines.items()
        ]


class Managed:
    """A manager with one replica, and what it has sent to its server."""

    def __init__(self, answer: Answer, **start: Any) -> None:
        self.ray = FakeRay(answer)
        self.session = FakeSession(self.ray, {"id-1": "10.0.0.1", "id-2": "10.0.0.2"})
        self._ours, theirs = socket.socketpair()
        wanted = StartCluster(1, 1, "", "", **start)
        self.manager = ClusterManager(theirs, wanted, self.session)
        self.manager._share = Share(1.0, 0.0, wanted.ranks)
        self.manager.add(1)

    def look(self, answer: Answer | None = None) -> list[FromManager]:
        """The messages of one look at the replicas."""
        if answer is not None:
            self.ray.answer = answer
        for replica in self.manager._replicas.values():
            replica.asked_at = 0.0
        self.manager._refused_at = 0.0
        self.manager.look(0.0)
        self._ours.setblocking(False)
        with suppress(BlockingIOError):
            return [from_manager.decode(line) for line in self._ours.recv(1 << 16).splitlines()]
        return []


STATUS = {"host": "10.0.0.1", "port": 4000, "node": "there", "version": metadata.version("bankfull")}
OLD = {**STATUS, "version": "0.0.9"}
ABSENT = RuntimeError(
    "ray::EngineReplica.status() (pid=7, ip=10.0.0.2)\nModuleNotFoundError: No module named 'bankfull'"
)


def test_a_node_with_another_version_is_named() -> None:
    with pytest.raises(ConfigError, match=r"The node there has bankfull 0\.0\.9, this server .*install the same"):
        Managed(OLD).look()


def test_a_node_without_the_package_is_named() -> None:
    with pytest.raises(ConfigError, match=r"The node 10\.0\.0\.2 has no bankfull"):
        Managed(ABSENT).look()


@pytest.mark.parametrize(("answer", "node"), [(OLD, "id-1"), ({**OLD, "node_id": "id-2"}, "id-2"), (ABSENT, "id-2")])
def test_a_node_that_differs_later_is_refused_alone(answer: Answer, node: str) -> None:
    """A replica whose machine was lost is restarted by Ray on the machine that differs."""
    made = Managed(STATUS)
    made.look()
    made.manager._beginning = False
    [refused] = made.look(answer)
    assert isinstance(refused, RefusedNodes) and list(refused.nodes) == [node]
    assert "it gets no replica until then" in refused.nodes[node]
    assert made.ray.killed == made.ray.created
    assert made.look(STATUS) == [ReplicaPlaced("replica-1", "10.0.0.1", 4000, "there", 1)]
    assert made.ray.created[-1].options["label_selector"] == {"ray.io/node-id": f"!in({node})"}
    del made.session.machines[node]
    assert made.look() == [RefusedNodes({})], "a node that has left is forgotten"


def test_a_replica_to_be_added_is_not_kept_for_a_refused_node() -> None:
    made = Managed(STATUS)
    made.look()
    made.manager._beginning = False
    made.manager.add(1)
    made.ray.created[-1].answer = {**OLD, "node_id": "id-2"}
    refused, cannot = made.look()
    assert isinstance(refused, RefusedNodes) and isinstance(cannot, CannotAdd)
    assert cannot.why == refused.nodes["id-2"] and list(made.manager._replicas) == ["replica-1"]
    assert made.ray.killed == made.ray.created[1:]


def test_a_manager_that_is_started_again_refuses_a_node_alone() -> None:
    made = Managed(OLD, again=True)
    assert [type(message) for message in made.look()] == [RefusedNodes]
    assert [type(message) for message in made.look(STATUS)] == [ReplicaPlaced]


def test_a_replica_that_cannot_be_created_is_created_again(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = RuntimeError("The actor died because of an error raised in its creation task, OSError: no port")
    with pytest.raises(ConfigError, match="no port"):
        Managed(failed).look()
    made = Managed(STATUS)
    made.look()
    made.manager._beginning = False
    monkeypatch.setattr(manager_module, "RETRY_SECONDS", 0.0)
    assert made.look(failed) == [ReplicaLost("replica-1", str(failed))]
    assert made.look(STATUS) == [ReplicaPlaced("replica-1", "10.0.0.1", 4000, "there", 1)]
    assert len(made.ray.created) == 2


def test_a_replica_that_moves_is_reported() -> None:
    made = Managed(STATUS)
    told = [*made.look()]
    made.manager._beginning = False
    told += made.look(RuntimeError("The actor is temporarily unavailable"))
    told += made.look({**STATUS, "port": 4001})
    first, moved = (ReplicaPlaced("replica-1", "10.0.0.1", port, "there", port - 4000) for port in (4000, 4001))
    assert told == [first, ReplicaLost("replica-1", "The actor is temporarily unavailable"), moved]
    assert len(made.ray.created) == 1, "Ray restarts it itself"


def placed(made: Managed, *places: tuple[str, int]) -> None:
    """The answers of the actors that were created last: node and port."""
    for actor, (node, port) in zip(made.ray.created[-len(places) :], places, strict=True):
        actor.answer = {**STATUS, "host": made.session.machines[node], "node_id": node, "port": port}


def test_a_replica_with_ranks_is_placed_when_its_gateway_knows_their_hosts() -> None:
    made = Managed(STATUS, ranks=4)
    assert made.session.groups == [(4, ())], "one bundle for each rank"
    assert [actor.options["scheduling_strategy"] for actor in made.ray.created] == [(0, number) for number in range(4)]
    placed(made, ("id-2", 1), ("id-1", 2), ("id-2", 3), ("id-1", 4))
    assert made.look() == []
    [told] = made.look()
    assert told == ReplicaPlaced("replica-1", "10.0.0.2", 1, "there", 0)
    [hosts] = made.ray.created[0].told
    assert hosts == (("10.0.0.2", 3), ("10.0.0.1", 2), ("10.0.0.1", 4)), "neighbours are on one machine"
    made.manager._beginning = False
    made.ray.created[1].answer = RuntimeError("The actor is temporarily unavailable")
    assert [type(message) for message in made.look()] == [ReplicaLost]
    placed(made, ("id-2", 1), ("id-1", 9), ("id-2", 3), ("id-1", 4))
    assert made.look() == [], "Ray has restarted a rank: the gateway is told first"
    assert [type(message) for message in made.look()] == [ReplicaPlaced]
    assert made.ray.created[0].told == ((("10.0.0.2", 3), ("10.0.0.1", 9), ("10.0.0.1", 4)),)
    made.manager.close()
    assert made.ray.killed == made.ray.created and made.session.released == [0]


def test_a_replica_leaves_a_node_whose_version_differs_with_all_of_its_ranks() -> None:
    made = Managed(STATUS, ranks=2, again=True)
    placed(made, ("id-1", 1), ("id-2", 2))
    made.ray.created[1].answer = {**OLD, "node_id": "id-2"}
    [refused] = made.look()
    assert isinstance(refused, RefusedNodes) and list(refused.nodes) == ["id-2"]
    assert made.ray.killed == made.ray.created and made.session.released == [0]
    made.look({**STATUS, "node_id": "id-1"})
    assert made.session.groups == [(2, ()), (2, ("id-2",))]
