"""A server with replicas is replaced by another one on the same port."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.kit import ClusterServer, processes, serving, until
from tests.cluster.ray_nodes import running_nodes
from tests.serve.test_handover import Hammer

pytest.importorskip("ray", reason="replicas need the package ray")
pytestmark = [pytest.mark.full, pytest.mark.cluster]

TOKENS = 200


def test_no_connection_is_refused_while_replicas_are_replaced(tmp_path: Path) -> None:
    taken_over(tmp_path, "--replicas", "2", "--replica-cpus", "0.5")


def test_a_new_server_gets_the_room_of_the_old_one_on_a_shared_ray(tmp_path: Path) -> None:
    """Three CPUs: the new server begins with the one that is free."""
    with running_nodes() as ray:
        variables = {"RAY_ADDRESS": ray.address, "RAY_AUTH_TOKEN": ray.token}
        taken_over(tmp_path, "--replicas", "2", "--replica-cpus", "1", engines=ray.engines, **variables)
        assert ray.replicas() == [] and ray.process.poll() is None


def taken_over(tmp_path: Path, *options: str, engines: Callable[[], list[int]] | None = None, **variables: str) -> None:
    """Start a server, and another one on its port. `engines`: those on a Ray that they share."""
    with serving(tmp_path / "data", *options, **variables) as old:
        until(lambda: old.states() == {"replica-1": "ready", "replica-2": "ready"})
        port = int(re.findall(r":(\d+)$", old.url)[0])
        expected = old.answer(TOKENS)
        started: list[ClusterServer] = []
        try:
            with Hammer(port) as hammer:
                until(lambda: min(hammer.counts) > 5)
                parts = old.stream(TOKENS)
                got = [next(parts)]
                started.append(
                    ClusterServer(tmp_path / "data", "--port", str(port), "--take-over", *options, **variables)
                )
                new = started[0]
                assert new.url, new.said()
                got.extend(parts)
                assert old.process.wait(90) == 0, old.said()
                before = list(hammer.counts)
                until(lambda: all(now > then + 5 for now, then in zip(hammer.counts, before, strict=True)))
            assert hammer.errors == []
            assert "".join(got) == expected == new.answer(TOKENS)
            assert new.status()["pid"] == new.process.pid, "commands go to the new server"
            until(lambda: list(new.states().values()) == ["ready"] * 2)
            assert len((engines or new.engines)()) == 2, "the engines of the old server have ended"
        finally:
            for server in started:
                server.close()
        until(lambda: not processes(old.mark), 30.0)
