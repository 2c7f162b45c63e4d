"""Processes are killed while clients stream: nothing is lost, and no token comes twice."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.kit import serving, until
from tests.cluster.storm import Storm, storm
from tests.serve.replicas.test_served_replicas import ServedReplicas
from tests.soak.figures import table

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are found as on Linux")
SEED = 22


@pytest.fixture
def local() -> Iterator[ServedReplicas]:
    made = ServedReplicas(3)
    try:
        made.until_all_ready()
        yield made
    finally:
        made.process.kill()
        made.process.wait()


def check(found: Storm, requests: int, kills: int, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print("\n" + table(found.figures()))
        print(*found.different[:20], sep="\n")
    assert found.different == []
    assert found.requests >= requests and len(found.kills) >= kills and found.resumed > 0


@pytest.mark.full
@pytest.mark.cluster
def test_a_short_storm(local: ServedReplicas, capsys: pytest.CaptureFixture[str]) -> None:
    check(asyncio.run(storm(local, requests=300, kills=5, distinct=28, seed=SEED)), 300, 5, capsys)


@pytest.mark.full
@pytest.mark.cluster
@pytest.mark.timeout(3600)
def test_a_hundred_kills_in_ten_thousand_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray", reason="replicas need the package ray")
    with serving(tmp_path / "data", "--replicas", "3", "--replica-cpus", "0.5") as server:
        until(lambda: list(server.states().values()) == ["ready"] * 3)
        found = asyncio.run(
            storm(server, requests=10_000, kills=100, distinct=210, seed=SEED, pause=1.0, all_at_once=25)
        )
    check(found, 10_000, 100, capsys)
