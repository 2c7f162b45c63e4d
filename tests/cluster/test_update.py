"""A rolling update: new weights in every replica while streams run, and no stream with tokens of two models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cluster.kit import Clients, ClusterServer, serving, until
from tests.tiny import speaking_folder

pytest.importorskip("ray", reason="replicas need the package ray")

TOKENS = 150


@pytest.mark.parametrize(
    ("options", "order"),
    [
        pytest.param(
            ["--replica-cpus", "0.5"],
            "loads the weights first",
            marks=[pytest.mark.full, pytest.mark.cluster],
            id="with-room",
        ),
        pytest.param(
            ["--replica-cpus", "1"], "drained first", marks=[pytest.mark.full, pytest.mark.cluster], id="without-room"
        ),
    ],
)
def test_no_stream_is_lost_or_mixes_two_models(tmp_path: Path, options: list[str], order: str) -> None:
    new = speaking_folder(6)
    with serving(tmp_path / "data", "--replicas", "2", *options) as server:
        until(lambda: server.states() == {"replica-1": "ready", "replica-2": "ready"})
        before = server.answer(TOKENS)
        with Clients(server, 3, TOKENS) as clients:
            until(lambda: len(clients.answers) > 2)
            code, out, error = server.cluster("update", str(new))
            done = len(clients.answers)
            until(lambda: len(clients.answers) > done + 3)
        assert code == 0, out + error
        assert order in out and "2 of 2" in out and f"All 2 replicas serve {new}" in out
        assert clients.errors == []
        after = server.answer(TOKENS)
        assert before != after
        assert set(clients.answers) == {before, after}, "a stream has tokens of both"
        assert clients.answers[-1] == after
        states = server.status()
        assert len({replica["weights"] for replica in states["replicas"]}) == 1 and len(states["replicas"]) == 2

        _refused_models(server, tmp_path)
        assert server.answer(TOKENS) == after and set(server.states().values()) == {"ready"}


def _refused_models(server: ClusterServer, folder: Path) -> None:
    other = folder / "other-template"
    shutil.copytree(speaking_folder(), other)
    for file in (other / "chat_template.jinja", other / "tokenizer_config.json"):
        if file.exists():
            file.write_text(file.read_text().replace("assistant", "model"))
    code, out, _ = server.cluster("update", str(other))
    assert code == 1 and f"{other} has another chat template than {speaking_folder()}" in out
    assert "Nothing was changed" in out

    broken = folder / "broken"
    shutil.copytree(speaking_folder(), broken)
    weights = next(broken.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:1000])
    code, out, _ = server.cluster("update", str(broken), "--json")
    told = json.loads(out)
    assert code == 1 and told["state"] == "failed" and told["updated"] == 0
    assert "cannot serve" in told["lines"][-1] and "Nothing was changed" in told["lines"][-1]

    code, out, _ = server.cluster("update", str(folder / "absent"))
    assert code == 1 and "There is no model" in out and "Nothing was changed" in out
