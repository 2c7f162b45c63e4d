"""Commands and clusters that cannot work are answered with one sentence, before or instead of a start."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from bankfull.cli.app import run_command
from bankfull.cluster import admin
from bankfull.cluster.manager import ClusterManager, PlacedActor
from bankfull.cluster.messages import ReplicaLost, ReplicaPlaced, StartCluster, from_manager
from bankfull.cluster.ray_session import _join_failure
from bankfull.errors import ConfigError
from bankfull.fleet.replica_range import ReplicaRange

ROOT = Path(__file__).parents[2]


class Answers:
    """In the place of Ray: every question has been answered already, by a status or an error."""

    def __init__(self, answer: dict[str, Any] | Exception) -> None:
        self.answer = answer

    def wait(self, asked: list[Any], **how: Any) -> tuple[list[Any], list[Any]]:
        return asked, []

    def get(self, asked: Any) -> dict[str, Any]:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def manager_with(ray: Answers) -> tuple[ClusterManager, socket.socket]:
    ours, theirs = socket.socketpair()
    manager = object.__new__(ClusterManager)  # without a session of Ray
    manager._connection, manager._ray = theirs, ray
    manager._start = StartCluster(1, 1, "", "")
    actor: Any = type("Actor", (), {"status": type("Method", (), {"remote": staticmethod(object)})})
    manager._replicas = {"replica-1": PlacedActor(actor)}
    return manager, ours


STATUS = {"host": "10.0.0.1", "port": 4000, "node": "there", "version": metadata.version("bankfull")}


def test_a_node_with_another_version_is_named() -> None:
    manager, ours = manager_with(Answers({**STATUS, "version": "0.0.9"}))
    with ours, pytest.raises(ConfigError, match=r"The node there has bankfull 0\.0\.9, this server .*install the same"):
        manager.look(0.0, first=True)


def test_a_node_without_the_package_is_named() -> None:
    manager, ours = manager_with(Answers(RuntimeError("ModuleNotFoundError: No module named 'bankfull'")))
    with ours, pytest.raises(ConfigError, match="A node of the cluster has no bankfull"):
        manager.look(0.0, first=True)


def test_a_replica_that_moves_is_reported() -> None:
    ray = Answers(STATUS)
    manager, ours = manager_with(ray)
    manager.look(0.0)
    ray.answer = RuntimeError("The actor is temporarily unavailable")
    manager._replicas["replica-1"].asked_at = 0.0
    manager.look(0.0)
    ray.answer = {**STATUS, "port": 4001}
    manager.look(0.0)
    with ours:
        told = [from_manager.decode(line) for line in ours.recv(1 << 16).splitlines()]
    first, moved = (ReplicaPlaced("replica-1", "10.0.0.1", port, "there", port - 4000) for port in (4000, 4001))
    assert told == [first, ReplicaLost("replica-1", "The actor is temporarily unavailable"), moved]


def test_other_versions_of_ray_or_python_are_named() -> None:
    text = "Version mismatch: The cluster was started with:\n    Ray: 2.59.0\n    Python: 3.12.1\nThis process ..."
    sentence = _join_failure("head:6379", text)
    assert "(Ray: 2.59.0 Python: 3.12.1): install the same versions on all nodes" in sentence


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--replicas", "none"], "'none' is no number of replicas"),
        (["--ray", "head:6379"], "--ray needs --replicas"),
        (["--replica-cpus", "2"], "--replica-cpus needs --replicas"),
        (["--replicas", "2", "--replica-cpus", "0"], "leaves a replica no processor"),
        (["--replicas", "2", "--replica-gpus", "-1"], "is no number of processors"),
        (["--replicas", "2", "--routing", "prefixes"], "did you mean 'prefix'"),
    ],
)
def test_options_that_cannot_work(options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["serve", "nowhere", *options]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1


@pytest.mark.parametrize(("version", "sentence"), [(None, r"pip install 'bankfull\[ray\]'"), ("2.9.3", "advisories")])
def test_ray_is_checked_before_anything_starts(
    version: str | None, sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr("bankfull.cluster.ray_version.version", found)
    assert run_command(["serve", "nowhere", "--replicas", "2"]) == 2
    assert sentence.replace("\\", "") in capsys.readouterr().err


class FakeCluster:
    def __init__(self) -> None:
        self.done: list[str] = []

    def status(self) -> dict[str, Any]:
        return {"done": self.done}

    def resize(self, bounds: ReplicaRange) -> None:
        self.done.append(f"resize {bounds}")

    def retire(self, name: str) -> None:
        raise ConfigError(f"There is no replica {name}.")


def test_commands_reach_the_server_of_the_same_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BANKFULL_DATA", str(tmp_path))

    async def command() -> None:
        made = admin.AdminSocket(FakeCluster())
        await made.start()
        try:
            assert made._folder is not None and made._folder.stat().st_mode & 0o077 == 0
            told = await asyncio.to_thread(admin.ask, {"do": "scale", "replicas": "1..3"})
            assert told == {"pid": os.getpid(), "done": ["resize 1..3"]}
            for bad, sentence in (
                ({"do": "scale", "replicas": "x"}, "no number of replicas"),
                ({"do": "drain", "name": "a"}, "There is no replica a"),
                ({"do": "dance"}, "does not know this command"),
            ):
                with pytest.raises(ConfigError, match=sentence):
                    await asyncio.to_thread(admin.ask, bad)
            with pytest.raises(ConfigError, match="process id 1 runs"):
                await asyncio.to_thread(admin.ask, {"do": "status"}, 1)
        finally:
            await made.close()
        with pytest.raises(ConfigError, match="No server with replicas runs"):
            admin.ask({"do": "status"})

    asyncio.run(asyncio.wait_for(command(), 60))


def test_notes_of_servers_that_were_killed_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BANKFULL_DATA", str(tmp_path))
    note = tmp_path / "cluster" / "1.json"
    note.parent.mkdir()
    note.write_text(json.dumps({"pid": 2**22 + 1, "socket": str(tmp_path)}))
    with pytest.raises(ConfigError, match="No server with replicas runs"):
        admin.ask({"do": "status"})
    assert not note.exists()


def test_the_manifest_starts_a_server_with_options_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    documents = list(yaml.safe_load_all((ROOT / "deploy/kuberay.yaml").read_text()))
    assert [one["kind"] for one in documents] == ["RayCluster", "Deployment", "Service"]
    (container,) = documents[1]["spec"]["template"]["spec"]["containers"]
    command = container["args"][0].split("exec bankfull ")[1].split()
    assert run_command(["serve", "--help"]) == 0
    known = capsys.readouterr().out
    assert all(word in known for word in command if word.startswith("--"))
    assert ReplicaRange.parse(command[command.index("--replicas") + 1]).scales
