"""Commands and clusters that cannot work are answered with one sentence, before or instead of a start."""

from __future__ import annotations

import asyncio
import json
import os
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from bankfull.cli.app import run_command
from bankfull.cluster import admin
from bankfull.cluster.ray_session import _join_failure
from bankfull.errors import ConfigError
from bankfull.fleet.replica_range import ReplicaRange

ROOT = Path(__file__).parents[2]


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
        (["--replicas", "2", "--replica-cpus", "1"], "leave --replica-cpus out, or add --ray HOST:PORT"),
        (["--replicas", "1..2"], "--replicas 1..2: a number that changes with demand needs Ray; add --ray HOST:PORT"),
        (["--replicas", "65"], "give 1 to 64"),
        (["--replicas", "2", "--parallel", "tp=2"], "Replicas of 2 ranks each (--parallel) need Ray to place them"),
        (["--separate", "prefill=1,decode=1", "--ray", "local"], "needs no Ray: leave out --ray local"),
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
    assert run_command(["serve", "nowhere", "--replicas", "2", "--ray", "local"]) == 2
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
            assert made._folder is not None and made._folder.path.stat().st_mode & 0o077 == 0
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
