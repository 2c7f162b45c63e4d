"""A server with replicas on a Ray of its own: one short life, with everything in it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.cluster.kit import ClusterServer, processes, serving, ticks, until

pytest.importorskip("ray", reason="replicas need the package ray")

TOKENS = 200
ATTEMPTS = 20


def test_a_stream_survives_its_replica_and_everything_ends(tmp_path: Path) -> None:
    with serving(tmp_path / "data", "--replicas", "2", "--replica-cpus", "0.5") as server:
        until(lambda: server.states() == {"replica-1": "ready", "replica-2": "ready"})
        expected = server.answer(TOKENS)
        assert len(server.engines()) == 2
        _listen_on_loopback_only(server.mark)

        for _ in range(ATTEMPTS):  # the engine may have written the whole answer before it is killed
            assert _answer_with_kill(server) == expected, "the very tokens that it would have had"
            until(lambda: set(server.states().values()) == {"ready"} and len(server.engines()) == 2)
            if any(replica["resumed"] for replica in server.replicas()):
                break
        else:
            pytest.fail("no stream was resumed")

        code, out, _ = server.cluster("down")
        assert code == 0 and "has ended" in out
        until(lambda: not processes(server.mark))
        assert server.process.wait(60) in (0, -signal.SIGTERM)


def _answer_with_kill(server: ClusterServer) -> str:
    """An answer whose engine is killed after a few tokens: the one that has used more processor time since its begin.
    Both are stopped first, so that none can finish it meanwhile."""
    engines = server.engines()
    before = {pid: ticks(pid) for pid in engines}
    parts = server.stream(TOKENS)
    got = [next(parts) for _ in range(3)]
    for pid in engines:
        os.kill(pid, signal.SIGSTOP)
    busy = max(engines, key=lambda pid: ticks(pid) - before[pid])
    os.kill(busy, signal.SIGKILL)
    for pid in set(engines) - {busy}:
        os.kill(pid, signal.SIGCONT)
    return "".join([*got, *parts])


def _listen_on_loopback_only(mark: str) -> None:
    """No socket of these processes listens on another address of this machine."""
    inodes = set()
    for pid in processes(mark):
        for file in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                link = os.readlink(file)
            except OSError:
                continue
            if link.startswith("socket:["):
                inodes.add(link[8:-1])
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    open_to_all = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            host, _, port = fields[1].partition(":")
            if fields[3] == "0A" and fields[9] in inodes and host not in loopback:
                open_to_all.append((host, int(port, 16)))
    assert open_to_all == []
