"""A machine whose network is cut in the middle of a stream."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.cluster.kit import ENGINE, processes, serving, until
from tests.cluster.network import Network, network, why_impossible
from tests.soak.figures import Figure, table
from tests.tiny import speaking_folder

TOKENS = 200

GATEWAY = """
import asyncio, sys
from bankfull.serve.engine.gateway import Gateway

async def serve():
    gateway = Gateway(b"t" * 32)
    print(await gateway.start(sys.argv[1], 7000), flush=True)
    await asyncio.Event().wait()

asyncio.run(serve())
"""
"""A gateway without Ray."""

FRONT = """
import asyncio, json, os, signal, sys, time
from bankfull import SamplingParams
from bankfull.outputs import Delta
from bankfull.serve.engine.link import Link
from bankfull.serve.engine.remote import RemoteEngine
from bankfull.serve.replicas.replica_set import ReplicaSet
from bankfull.fleet.routing import routing_policy
from bankfull.submit import Submit

OPTIONS = {"dtype": "float32", "memory": "1MiB", "page_tokens": 4}
PARAMS = SamplingParams(seed=3, max_tokens=int(sys.argv[2]), ignore_eos=True)

def link(host):
    return Link(sys.argv[1], OPTIONS, threads=1, tells_prefixes=True,
        open_engine=lambda receive: RemoteEngine(receive, (host, 7000), b"t" * 32))

async def answer(replicas, links, stop):
    tokens, last, pause = [], time.monotonic(), 0.0
    async for items in replicas.generate(Submit([5, 6, 7], PARAMS)):
        now = time.monotonic()
        pause, last = max(pause, now - last), now
        tokens += [token for item in items if isinstance(item, Delta) for token in item.token_ids]
        if stop and len(tokens) >= 10:
            stop = False
            where = next(view.name for view in replicas.views() if view.requests)
            os.kill(links[where].engine_pid, signal.SIGSTOP)
            print(json.dumps({"runs": where}), flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            last = time.monotonic()
    return tokens, pause

async def main():
    links = {host: link(host) for host in sys.argv[3:]}
    replicas = ReplicaSet(links, routing_policy("least-loaded"))
    await replicas.start()
    while not all(one.ready for one in links.values()):
        await asyncio.sleep(0.05)
    usual, _ = await answer(replicas, links, False)
    print(json.dumps({"usual": len(usual)}), flush=True)
    tokens, pause = await answer(replicas, links, True)
    print(json.dumps({"same": tokens == usual, "pause": pause, "resumed": sum(v.resumed for v in replicas.views())}),
        flush=True)
    await replicas.close()

asyncio.run(main())
"""
"""A front with one engine on each of the given hosts. It stops the engine of its stream, so that the answer is not
complete before the test has cut the network."""


@pytest.fixture(scope="module")
def possible() -> None:
    if why := why_impossible():
        pytest.skip(why)


@pytest.fixture
def three(possible: None) -> Iterator[Network]:
    with network(3) as made:
        yield made


def started(command: list[str], **how: object) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **how)  # type: ignore[call-overload,no-any-return]


@contextmanager
def stopped() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that end, with their children, when the test does."""
    begun: list[subprocess.Popen[str]] = []
    try:
        yield begun
    finally:
        for process in begun:
            for pid in [*_children(process.pid), process.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


def test_a_stream_leaves_a_machine_without_network(three: Network, capsys: pytest.CaptureFixture[str]) -> None:
    """Without Ray: a front, and two machines with a gateway each."""

    def line(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        text = process.stdout.readline()
        assert text, "it has ended"
        return text

    with stopped() as begun:
        hosts = [three.address(machine) for machine in (1, 2)]
        for machine, host in enumerate(hosts, 1):
            begun.append(started(three.on(machine, sys.executable, "-c", GATEWAY, host)))
            line(begun[-1])
        command = [sys.executable, "-c", FRONT, str(speaking_folder()), str(TOKENS), *hosts]
        front = started(three.on(0, *command))
        begun.append(front)
        assert json.loads(line(front)) == {"usual": TOKENS}
        where = json.loads(line(front))["runs"]
        three.cut(1 + hosts.index(where))
        assert front.stdin is not None
        front.stdin.write("\n")
        front.stdin.flush()
        told = json.loads(line(front))
    with capsys.disabled():
        print("\n" + table([Figure("network cut: pause of the stream", told["pause"], "s")]))
    assert told["same"] and told["resumed"] == 1


class RayMachines:
    """Ray on two machines with one CPU each; the server runs on the first."""

    def __init__(self, there: Network, folder: Path) -> None:
        self.there = there
        self.head = f"{there.address(0)}:6379"
        self.token = secrets.token_hex(32)
        self.environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token, "RAY_USAGE_STATS_ENABLED": "0"}
        self.environment |= {"RAY_TMPDIR": str(folder), "BANKFULL_TEST_NODES": str(folder)}
        self.mark = f"BANKFULL_TEST_NODES={folder}"

    def start(self) -> None:
        self._start(0, "--head", "--port", "6379", "--include-dashboard=false")
        self._start(1, "--address", self.head)

    def _start(self, machine: int, *options: str) -> None:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options, "--num-cpus", "1"]
        command += ["--node-ip-address", self.there.address(machine), "--object-store-memory", str(80 << 20)]
        command += ["--disable-usage-stats"]
        done = subprocess.run(
            self.there.on(machine, *command), capture_output=True, text=True, env=os.environ | self.environment
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def engines(self) -> list[int]:
        return [pid for pid, command in processes(self.mark).items() if ENGINE in command]

    def close(self) -> None:
        for pid in processes(self.mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until(lambda: not processes(self.mark), 30.0)


@pytest.fixture
def two_with_ray(possible: None) -> Iterator[tuple[Network, RayMachines]]:
    pytest.importorskip("ray", reason="replicas need the package ray")
    folder = Path(tempfile.mkdtemp(prefix="bf-nodes-"))  # short: Ray puts sockets below it
    with network(2) as made:
        machines = RayMachines(made, folder)
        try:
            machines.start()
            yield made, machines
        finally:
            machines.close()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.full
@pytest.mark.cluster
def test_streams_leave_a_ray_node_without_network(
    two_with_ray: tuple[Network, RayMachines], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there, ray = two_with_ray
    options = ("--replicas", "2", "--ray", ray.head, "--routing", "round-robin")
    with there.inside(0), serving(tmp_path / "data", *options, **ray.environment) as server:
        until(lambda: list(server.states().values()) == ["ready"] * 2)
        hosts = {replica["name"]: replica["address"].rpartition(":")[0] for replica in server.status()["replicas"]}
        assert set(hosts.values()) == {there.address(0), there.address(1)}, "one replica on each machine"
        [far] = [name for name, host in hosts.items() if host == there.address(1)]
        [engine] = [pid for pid in ray.engines() if _namespace(pid) != _namespace(server.process.pid)]
        expected = server.answer(TOKENS)
        for _ in range(10):  # until a stream runs on the far machine, and is not complete yet
            parts = server.stream(TOKENS)
            got = next(parts)
            os.kill(engine, signal.SIGSTOP)
            if any(replica["name"] == far and replica["requests"] for replica in server.replicas()):
                break
            os.kill(engine, signal.SIGCONT)
            assert got + "".join(parts) == expected
        there.cut(1)
        pause, last = 0.0, time.monotonic()
        for part in parts:
            got, pause, last = got + part, max(pause, time.monotonic() - last), time.monotonic()
        assert got == expected
        assert {replica["name"]: replica["resumed"] for replica in server.replicas()}[far] == 1
        assert server.answer(TOKENS) == expected
    with capsys.disabled():
        print("\n" + table([Figure("network cut of a Ray node: pause of the stream", pause, "s")]))


def _namespace(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")


def _children(pid: int) -> list[int]:
    try:
        own = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return own + [below for child in own for below in _children(child)]
