"""`bankfull serve --replicas 2` on one machine: processes without Ray, and `bankfull cluster` on them."""

from __future__ import annotations

import signal
from pathlib import Path

from bankfull.cluster.local_replicas import memory_of
from tests.cluster.kit import ClusterServer, answer_with_kill, processes, until

TOKENS = 200
READY = {"replica-1": "ready", "replica-2": "ready"}


def test_replicas_of_one_machine_need_no_ray(tmp_path: Path) -> None:
    server = ClusterServer(tmp_path / "data", "--replicas", "2", without_ray=True)
    try:
        assert server.url, server.said()
        until(lambda: server.states() == READY)
        expected = server.answer(TOKENS)
        assert len(server.engines()) == 2
        assert not any("ray" in command.split("/")[-1] for command in processes(server.mark).values())
        for _ in range(20):  # the engine may have written the whole answer before it is killed
            assert answer_with_kill(server, TOKENS) == expected, "the stream goes on elsewhere"
            until(lambda: server.states() == READY and len(server.engines()) == 2)
            if any(replica["resumed"] for replica in server.replicas()):
                break
        else:
            raise AssertionError("no stream was resumed")
        assert server.status()["ray"] is None and sum(one["restarts"] for one in server.status()["replicas"]) >= 1
        code, out, _ = server.cluster("status")
        assert code == 0 and "processes of this machine" in out

        code, _, error = server.cluster("update")
        assert code == 2 and "--take-over" in error and error.count("\n") == 1
        code, _, error = server.cluster("scale", "1..2")
        assert code == 2 and "needs Ray" in error
        assert server.cluster("drain", "replica-1")[0] == 0
        until(lambda: server.states() == {"replica-2": "ready"} and len(server.engines()) == 1)
        code, _, error = server.cluster("drain", "replica-2")
        assert code == 2 and "is the only replica" in error
        assert server.cluster("scale", "2")[0] == 0
        until(lambda: server.states() == {"replica-2": "ready", "replica-3": "ready"})
        assert server.answer(TOKENS) == expected

        code, out, _ = server.cluster("down")
        assert code == 0 and "has ended" in out
        until(lambda: not processes(server.mark))
        assert server.process.wait(60) in (0, -signal.SIGTERM)
    finally:
        if server.process.poll() is None:
            server.process.kill()


def test_replicas_share_the_memory_that_one_engine_would_take() -> None:
    assert (memory_of(1, "cpu"), memory_of(2, "cpu"), memory_of(3, "cpu")) == ("40%", "20%", "13.33%")
