"""Replicas on several Ray nodes, and the ways in which a cluster fails."""

from __future__ import annotations

import os
import re
import signal
import socket
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.kit import ClusterServer, processes, serving, until
from tests.cluster.ray_nodes import RayNodes, running_nodes

pytest.importorskip("ray", reason="replicas need the package ray")
pytestmark = [pytest.mark.full, pytest.mark.cluster]


@pytest.fixture
def ray_nodes() -> Iterator[RayNodes]:
    with running_nodes() as nodes:
        yield nodes


def test_a_stream_survives_a_node_and_the_cluster_is_left_as_it_was(ray_nodes: RayNodes, tmp_path: Path) -> None:
    options = ("--replicas", "3", "--ray", ray_nodes.address)
    with serving(tmp_path / "data", *options, RAY_AUTH_TOKEN=ray_nodes.token) as server:
        until(lambda: list(server.states().values()) == ["ready"] * 3)
        told = server.status()
        assert told["nodes"] == 3 and told["ray"] == ray_nodes.address
        expected = server.answer(200)
        streams = [server.stream(200) for _ in range(3)]
        got = [[next(parts) for _ in range(3)] for parts in streams]
        ray_nodes.kill_node()
        for parts, text in zip(streams, got, strict=True):
            text.extend(parts)
            assert "".join(text) == expected
        until(lambda: sorted(server.states().values()).count("ready") == 2)
        assert server.answer(200) == expected
        code, _, error = server.cluster("scale", "2")
        assert code == 0, error
        until(lambda: list(server.states().values()) == ["ready"] * 2)
        assert server.answer(200) == expected
    assert ray_nodes.process.poll() is None, "the server has not started this Ray, and does not end it"
    with serving(tmp_path / "data", "--replicas", "2", RAY_ADDRESS=ray_nodes.address, RAY_AUTH_TOKEN=ray_nodes.token):
        pass  # all CPUs are free again


def test_a_node_with_another_version_that_joins_later_is_refused_alone(ray_nodes: RayNodes, tmp_path: Path) -> None:
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "sitecustomize.py").write_text("import bankfull\nbankfull.__version__ = '0.0.9'\n")
    options = ("--replicas", "3", "--ray", ray_nodes.address)
    with serving(tmp_path / "data", *options, RAY_AUTH_TOKEN=ray_nodes.token) as server:
        until(lambda: list(server.states().values()) == ["ready"] * 3)
        expected = server.answer(200)
        ray_nodes.add_node(modules)
        streams = [server.stream(200) for _ in range(3)]
        got = [[next(parts)] for parts in streams]
        ray_nodes.kill_node()  # Ray restarts its replica on the node with the other version
        for parts, text in zip(streams, got, strict=True):
            text.extend(parts)
            assert "".join(text) == expected
        until(lambda: bool(server.status()["refused"]))
        [sentence] = server.status()["refused"]
        assert "has bankfull 0.0.9, this server" in sentence and "it gets no replica until then" in sentence
        assert server.said().count(sentence) == 1 and sentence in server.cluster("status")[1]
        assert sorted(server.states().values()).count("ready") == 2
        code, _, error = server.cluster("scale", "4")
        assert code == 0, error
        until(lambda: "room for 2" in server.status()["problem"])
        assert server.answer(200) == expected

        ray_nodes.add_node()
        until(lambda: list(server.states().values()) == ["ready"] * 3)
        restarts = [replica["restarts"] for replica in server.status()["replicas"]]
        assert restarts.count(0) == 2, "the others have gone on"
        assert "are started again" not in server.said() and server.answer(200) == expected


def test_pools_on_several_nodes_hand_over_pages_and_survive_an_engine(ray_nodes: RayNodes, tmp_path: Path) -> None:
    with serving(tmp_path / "alone") as alone:
        expected = alone.answer(60)
    options = ("--separate", "prefill=1,decode=2,exchange=1MiB", "--ray", ray_nodes.address)
    with serving(tmp_path / "data", *options, RAY_AUTH_TOKEN=ray_nodes.token) as server:
        until(lambda: server.states() == dict.fromkeys(("prefill-0", "decode-0", "decode-1"), "ready"))
        assert server.answer(60) == expected
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as told:
            counts = dict(re.findall(r"^bankfull:(separate_\w+)\{[^}]*\} (\S+)$", told.read().decode(), re.MULTILINE))
        assert float(counts["separate_pages_total"]) > 0 and float(counts["separate_late_pages_total"]) == 0
        for pid in ray_nodes.engines():
            os.kill(pid, signal.SIGKILL)
        until(lambda: set(server.states().values()) == {"ready"} and len(ray_nodes.engines()) == 3)
        assert server.answer(60) == expected
        code, _, said = server.cluster("scale", "4")
        assert code and "fixed size" in said and said.count("\n") == 1
    until(lambda: not ray_nodes.replicas())


def test_a_cluster_with_another_token_is_not_joined(ray_nodes: RayNodes, tmp_path: Path) -> None:
    for token in ("0" * 64, ""):
        options = ("--replicas", "1", "--ray", ray_nodes.address)
        refused(tmp_path, "does not accept this server's token", *options, RAY_AUTH_TOKEN=token)


def test_an_unreachable_head_is_named(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    refused(tmp_path, f"No Ray cluster answers at {address}", "--replicas", "1", "--ray", address)
    refused(tmp_path, "not of the form HOST:PORT", "--replicas", "1", "--ray", "ray://x")


def test_too_few_processors_are_named(tmp_path: Path) -> None:
    refused(tmp_path, "room for 0; give fewer --replicas", "--replicas", "1", "--replica-cpus", "4096")
    refused(tmp_path, "or a smaller --replica-gpus", "--replicas", "1", "--replica-gpus", "64")


def test_a_lost_manager_is_replaced_with_its_replicas(tmp_path: Path) -> None:
    with serving(tmp_path / "data", "--replicas", "1") as server:
        expected = server.answer(50)
        (manager,) = (pid for pid, command in processes(server.mark).items() if "bankfull.cluster.manager" in command)
        os.kill(manager, signal.SIGKILL)
        until(lambda: server.states() == {"replica-2": "ready"})
        assert server.answer(50) == expected
        assert "The replicas are started again" in server.said()


@pytest.mark.parametrize("also_manager", [False, True], ids=["server", "server and manager"])
def test_a_killed_server_leaves_nothing_behind(tmp_path: Path, also_manager: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="bf-") as temporary:  # short: Ray puts sockets below it
        server = ClusterServer(tmp_path / "data", "--replicas", "1", TMPDIR=temporary)
        assert server.url, server.said()
        parts = server.stream(200)
        next(parts)
        assert list(Path(temporary).glob("bankfull-ray-*"))
        _kill(server, also_manager=also_manager)
        until(lambda: not processes(server.mark))
        code, _, error = server.cluster("status")
        assert code == 2 and "No server with replicas runs" in error
        assert not list(Path(temporary).iterdir()), "the command has removed its folders"


def test_a_server_killed_with_its_manager_leaves_nothing_on_a_shared_ray(ray_nodes: RayNodes, tmp_path: Path) -> None:
    variables = {"RAY_ADDRESS": ray_nodes.address, "RAY_AUTH_TOKEN": ray_nodes.token}
    server = ClusterServer(tmp_path / "data", "--replicas", "3", **variables)
    assert server.url, server.said()
    until(lambda: list(server.states().values()) == ["ready"] * 3)
    assert len(ray_nodes.replicas()) == 6
    parts = server.stream(200)
    next(parts)
    _kill(server, also_manager=True)
    until(lambda: not processes(server.mark) and not ray_nodes.replicas())
    with serving(tmp_path / "data", "--replicas", "3", **variables) as another:
        until(lambda: list(another.states().values()) == ["ready"] * 3)


def _kill(server: ClusterServer, *, also_manager: bool) -> None:
    """At the same moment: none of them sees the other one end."""
    pids = [server.process.pid]
    if also_manager:
        pids += [pid for pid, command in processes(server.mark).items() if "bankfull.cluster.manager" in command]
        assert len(pids) == 2
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, number)
    server.process.wait()


def refused(tmp_path: Path, sentence: str, *options: str, **variables: str) -> str:
    """The server ends with one sentence, and nothing that it has started is left."""
    server = ClusterServer(tmp_path / "data", *options, **variables)
    assert server.process.wait(120) == 2
    (line,) = [line for line in server.said().splitlines() if line.startswith("bankfull: ")]
    assert sentence in line
    until(lambda: not processes(server.mark), 10.0)
    return line
