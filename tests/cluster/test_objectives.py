"""Replicas are added for latency objectives that are missed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cluster.kit import Clients, serving, until

pytest.importorskip("ray", reason="replicas need the package ray")
pytestmark = [pytest.mark.full, pytest.mark.cluster]

TOKENS = 100


def test_a_replica_is_added_for_missed_objectives_without_a_queue(tmp_path: Path) -> None:
    options = ("--replicas", "1..2", "--replica-cpus", "0.5", "--slo", "ttft=10us, tpot=10us")
    options += ("--routing", "least-loaded")  # prompts are equal, and stay where they are cached with prefix routing
    with serving(tmp_path / "data", *options) as server:
        assert server.states() == {"replica-1": "ready"}
        expected = server.answer(TOKENS)
        with Clients(server, 3, TOKENS) as clients:  # fewer than the rows: none waits in a queue
            until(lambda: server.states() == {"replica-1": "ready", "replica-2": "ready"})
            until(lambda: all(replica["requests"] for replica in server.replicas()))
        assert clients.errors == [] and set(clients.answers) == {expected}
        assert re.search(
            r"A replica is added \(1 before, 2 now\), because .* missed a latency objective", server.said()
        )
