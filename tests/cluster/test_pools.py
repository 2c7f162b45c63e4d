"""Pools of `--separate` on a cluster: which replica becomes which engine, and what happens when one is lost. The
manager and the engines are the test's own; `test_nodes` has real ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from bankfull.cluster import admin, managed_set
from bankfull.cluster.cluster_pools import ClusterPools, PoolOptions, cluster_pools
from bankfull.cluster.messages import ClusterFailed, ClusterUp, FromManager, ReplicaPlaced, StartCluster
from bankfull.errors import ConfigError
from bankfull.fleet.replica_range import ReplicaRange
from bankfull.fleet.routing import routing_policy
from bankfull.handshake.link_tls import LinkTls
from bankfull.serve.engine.wire import ExchangeEnds
from bankfull.serve.replicas.local import Separation
from tests.serve.replicas.fake_links import FakeLink

OPTIONS = PoolOptions(pools=Separation(1, 2, 1 << 20), model="tiny", ray="head:6379", tls="/link")
UP = ClusterUp(threads=3, cpus=3.0, gpus=0.0, nodes=3, local=False)


class ScriptedManager:
    """Says what the test puts into its queue; None: it ends."""

    made: ClassVar[list[ScriptedManager]] = []

    def __init__(self) -> None:
        self.queue: asyncio.Queue[FromManager | None] = asyncio.Queue()
        self.wanted: StartCluster | None = None
        self.made.append(self)

    async def start(self, wanted: StartCluster) -> None:
        self.wanted = wanted

    async def messages(self) -> AsyncIterator[FromManager]:
        while (message := await self.queue.get()) is not None:
            yield message

    async def end(self) -> int:
        return 1

    async def say(self, *messages: FromManager | None) -> None:
        for message in messages:
            self.queue.put_nowait(message)
        for _ in range(20):
            await asyncio.sleep(0)


@dataclass
class PlacedLink(FakeLink):
    ends: ExchangeEnds | None = None
    open_engine: Any = None
    threads: int | None = None
    tries: int = 0

    def try_again(self) -> None:
        self.tries += 1

    @property
    def address(self) -> tuple[str, int]:
        """Where it would connect to now."""
        found: tuple[str, int] = self.open_engine(lambda message: None)._address
        return found


class Pools:
    """The set, and the links that it has made."""

    def __init__(self) -> None:
        self.links: list[PlacedLink] = []
        self.set = ClusterPools(self.make_link, routing_policy("prefix"), OPTIONS)  # type: ignore[arg-type]

    def make_link(self, *, open_engine: Any, threads: int, exchange: ExchangeEnds) -> PlacedLink:
        self.links.append(PlacedLink(ends=exchange, open_engine=open_engine, threads=threads))
        return self.links[-1]

    @property
    def manager(self) -> ScriptedManager:
        return ScriptedManager.made[-1]

    def named(self, name: str) -> Any:
        return self.set._links[name]


def placed(number: int, port: int = 0) -> ReplicaPlaced:
    return ReplicaPlaced(f"replica-{number}", f"10.0.0.{number}", port or 4000 + number, f"node-{number}")


def run(what: Callable[[Pools], Coroutine[Any, Any, None]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(managed_set, "ManagerProcess", ScriptedManager)
    monkeypatch.setattr(managed_set, "FIRST_PAUSE", 0.0)
    monkeypatch.setattr(admin.AdminSocket, "start", _nothing)
    ScriptedManager.made = []

    async def bounded() -> None:
        pools = Pools()
        await pools.set.start()
        try:
            await asyncio.sleep(0)
            await asyncio.wait_for(what(pools), 30)
        finally:
            await pools.set.close()

    asyncio.run(bounded())


async def _nothing(self: Any) -> None:
    pass


def test_replicas_become_engines_of_the_pools_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go(pools: Pools) -> None:
        assert pools.manager.wanted is not None
        assert (pools.manager.wanted.replicas, pools.manager.wanted.address) == (3, "head:6379")
        await pools.manager.say(placed(2), placed(1), placed(3))
        assert not pools.links, "all of them first"
        await pools.manager.say(UP)
        await pools.set.wait_all_ready()
        assert [view.name for view in pools.set.views()] == ["prefill-0", "decode-0", "decode-1"]
        found = {name: (pools.named(name).address, pools.named(name).ends.own) for name in pools.set._links}
        assert found == {
            "prefill-0": (("10.0.0.2", 4002), None),
            "decode-0": (("10.0.0.1", 4001), 0),
            "decode-1": (("10.0.0.3", 4003), 1),
        }
        secrets = {link.ends.secret for link in pools.links if link.ends is not None}
        assert secrets == {b""}, "engines behind gateways inherit it; these messages cross a network"
        assert all(link.threads == 3 and link.ends and link.ends.lanes == 2 for link in pools.links)
        assert all(not link.ends.files for link in pools.links if link.ends is not None)

    run(go, monkeypatch)


def test_the_manager_and_all_engines_are_told_of_the_files_for_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go(pools: Pools) -> None:
        assert pools.manager.wanted is not None and pools.manager.wanted.tls == "/link"
        await pools.manager.say(placed(1), placed(2), placed(3), UP)
        await pools.set.wait_all_ready()
        for link in pools.links:
            assert link.ends is not None and link.ends.tls == "/link"
            assert link.open_engine(lambda message: None)._tls == LinkTls(Path("/link"))
        assert len(pools.links) == 3

    run(go, monkeypatch)


def test_a_replica_that_ray_has_moved_is_found_at_its_new_address(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go(pools: Pools) -> None:
        await pools.manager.say(placed(1), placed(2), placed(3), UP)
        await pools.manager.say(placed(2, port=5000))
        link = pools.named("decode-0")
        assert link.address == ("10.0.0.2", 5000) and link.tries == 1
        assert len(pools.links) == 3, "the link is the same"
        link.failure = "It cannot load the model."
        await pools.manager.say(placed(2, port=5001))
        assert pools.named("decode-0") is not link and pools.named("decode-0").ends.own == 0

    run(go, monkeypatch)


def test_a_lost_manager_is_replaced_with_all_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go(pools: Pools) -> None:
        await pools.manager.say(placed(1), placed(2), placed(3), UP)
        await pools.manager.say(None)
        while len(ScriptedManager.made) < 2:
            await asyncio.sleep(0.001)
        assert not pools.set.views() and all(link.closed for link in pools.links)
        await asyncio.sleep(0)
        wanted = pools.manager.wanted
        assert wanted is not None and wanted.first == 4 and wanted.again
        await pools.manager.say(placed(4), placed(5), placed(6), UP)
        assert [view.name for view in pools.set.views()] == ["prefill-0", "decode-0", "decode-1"]
        assert pools.set.status()["starting"] == 0

    run(go, monkeypatch)


def test_a_cluster_that_cannot_be_used_ends_the_start_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go(pools: Pools) -> None:
        assert "starting" in pools.set.says
        await pools.manager.say(ClusterFailed("The head does not answer."), None)
        with pytest.raises(ConfigError, match="The head does not answer"):
            await pools.set.wait_ready()

    run(go, monkeypatch)


def test_pools_are_not_resized(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go(pools: Pools) -> None:
        for ask in (
            lambda: pools.set.resize(ReplicaRange(4, 4)),
            lambda: pools.set.retire("decode-0"),
            lambda: pools.set.update(None, None),
        ):
            with pytest.raises(ConfigError, match="fixed size"):
                ask()

    run(go, monkeypatch)


def test_shared_memory_is_refused_on_a_cluster() -> None:
    with pytest.raises(ConfigError, match="link=memory needs engines on one machine"):
        cluster_pools(PoolOptions(pools=Separation(1, 1, 1 << 20, "memory"), model="tiny", ray="head:6379"))
