"""A server with replicas on a Ray of its own: one short life, with everything in it."""

from __future__ import annotations

import re
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cluster.kit import answer_with_kill, processes, serving, until
from tests.cluster.listening import documented, listening, per_process

pytest.importorskip("ray", reason="replicas need the package ray")

TOKENS = 200
ATTEMPTS = 20


@pytest.mark.full
def test_a_stream_survives_its_replica_and_everything_ends(tmp_path: Path) -> None:
    with serving(tmp_path / "data", "--replicas", "2", "--replica-cpus", "0.5") as server:
        until(lambda: server.states() == {"replica-1": "ready", "replica-2": "ready"})
        expected = server.answer(TOKENS)
        assert len(server.engines()) == 2
        found = listening(server.mark)
        assert set(per_process(found)) == documented("--ray"), "the table in docs/security.md"
        assert [one for one in found if not one.loopback] == []
        _show_no_secret(server.mark)

        for _ in range(ATTEMPTS):  # the engine may have written the whole answer before it is killed
            assert answer_with_kill(server, TOKENS) == expected, "the very tokens that it would have had"
            until(lambda: set(server.states().values()) == {"ready"} and len(server.engines()) == 2)
            if any(replica["resumed"] for replica in server.replicas()):
                break
        else:
            pytest.fail("no stream was resumed")

        code, out, _ = server.cluster("down")
        assert code == 0 and "has ended" in out
        until(lambda: not processes(server.mark))
        assert server.process.wait(60) in (0, -signal.SIGTERM)


def _show_no_secret(mark: str) -> None:
    """`ps` shows command lines to everybody, and environments to the same user."""
    secret = re.compile(rb"(token|secret|password|key)[a-z_-]*=[0-9a-z_-]{16,}|[0-9a-f]{64}", re.IGNORECASE)
    for pid in processes(mark):
        for name in ("cmdline", "environ"):
            with suppress(OSError):
                for part in Path(f"/proc/{pid}/{name}").read_bytes().split(b"\0"):
                    assert not secret.search(part), (name, part)
