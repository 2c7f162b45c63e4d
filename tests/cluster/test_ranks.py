"""Replicas with several ranks on Ray: where their actors are, the tokens of one process, and ranks that are killed."""

from __future__ import annotations

import os
import signal
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from shutil import rmtree

import pytest

from bankfull import LLM
from tests.cluster.kit import BODY, ClusterServer, processes, serving, ticks, until
from tests.cluster.network import network, why_impossible
from tests.cluster.test_network import RayMachines
from tests.tiny import speaking_folder

pytest.importorskip("ray", reason="replicas need the package ray")

RANK = "bankfull.parallel.rank"
TOKENS = 200
ATTEMPTS = 5


def ranks(mark: str) -> list[int]:
    return [pid for pid, command in processes(mark).items() if f"-m {RANK} " in command]


def all_ready(server: ClusterServer, replicas: int) -> None:
    until(lambda: list(server.states().values()) == ["ready"] * replicas)


@pytest.fixture(scope="module")
def expected() -> str:
    """The answer of one process."""
    llm = LLM(str(speaking_folder()), dtype="float32", page_tokens=4)
    params = replace(llm.default_params(), temperature=1.0, seed=7, max_tokens=TOKENS, ignore_eos=True)
    return llm.chat(BODY["messages"], params)[0].outputs[0].text  # type: ignore[arg-type]


@pytest.mark.full
def test_an_engine_whose_rank_is_killed_starts_again(tmp_path: Path, expected: str) -> None:
    """Without Ray."""
    with serving(tmp_path / "data", "--parallel", "tp=2") as server:
        until(lambda: _ready(server))
        assert server.answer(TOKENS) == expected
        [rank], [engine] = ranks(server.mark), server.engines()
        os.kill(rank, signal.SIGKILL)
        until(lambda: server.engines() not in ([], [engine]))  # without a request that would notice it
        until(lambda: _ready(server))
        assert server.answer(TOKENS) == expected
        assert "the engine stops: rank 1 has ended." in server.said() and "Traceback" not in server.said()
    assert not ranks(server.mark)


def _ready(server: ClusterServer) -> bool:
    try:
        with urllib.request.urlopen(f"{server.url}/ready", timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.mark.full
@pytest.mark.cluster
def test_streams_leave_a_replica_whose_rank_is_killed(tmp_path: Path, expected: str) -> None:
    options = ("--replicas", "2", "--replica-cpus", "1", "--parallel", "tp=2", "--routing", "round-robin")
    with serving(tmp_path / "data", *options) as server:
        all_ready(server, 2)
        assert len(ranks(server.mark)) == 2, "one beside rank 0 of each replica"
        assert server.answer(TOKENS) == expected
        for _ in range(ATTEMPTS):  # the engine may have written the whole answer before its rank is killed
            assert _answer_with_kill(server) == expected
            until(lambda: len(ranks(server.mark)) == 2)
            all_ready(server, 2)
            if any(replica["resumed"] for replica in server.replicas()):
                break
        else:
            pytest.fail("no stream was resumed")
    assert not ranks(server.mark)


def _answer_with_kill(server: ClusterServer) -> str:
    """An answer of a replica whose rank is killed after a few tokens: the one with more processor time since."""
    before = {pid: ticks(pid) for pid in ranks(server.mark)}
    parts = server.stream(TOKENS)
    got = [next(parts) for _ in range(3)]
    engines = server.engines()
    for pid in engines:  # none can finish the answer meanwhile
        os.kill(pid, signal.SIGSTOP)
    os.kill(max(before, key=lambda pid: ticks(pid) - before[pid]), signal.SIGKILL)
    for pid in engines:
        os.kill(pid, signal.SIGCONT)
    return "".join([*got, *parts])


@contextmanager
def two_ray_machines() -> Iterator[RayMachines]:
    if why := why_impossible():
        pytest.skip(why)
    folder = Path(tempfile.mkdtemp(prefix="bf-nodes-"))  # short: Ray puts sockets below it
    with network(2) as made:
        machines = RayMachines(made, folder)
        try:
            machines.start()
            yield machines
        finally:
            machines.close()
            rmtree(folder, ignore_errors=True)


@pytest.mark.full
@pytest.mark.cluster
@pytest.mark.parametrize("parallel", ["tp=2", "pp=2"])
def test_a_replica_over_two_machines_has_the_tokens_of_one_process(
    tmp_path: Path, parallel: str, expected: str
) -> None:
    with two_ray_machines() as machines, machines.there.inside(0):
        options = ("--replicas", "1", "--ray", machines.head, "--parallel", parallel)
        with serving(tmp_path / "data", *options, **machines.environment) as server:
            all_ready(server, 1)
            [engine], [rank] = machines.engines(), ranks(machines.mark)
            assert os.readlink(f"/proc/{engine}/ns/net") != os.readlink(f"/proc/{rank}/ns/net")
            assert server.answer(TOKENS) == expected
            [host] = [pid for pid, name in processes(machines.mark).items() if name.startswith("ray::HostedRank")]
            os.kill(host, signal.SIGKILL)
            until(lambda: ranks(machines.mark) not in ([], [rank]))  # Ray starts the host again, at another port
            all_ready(server, 1)
            assert server.answer(TOKENS) == expected, "the replica has started again"
        until(lambda: not ranks(machines.mark), 30.0)
