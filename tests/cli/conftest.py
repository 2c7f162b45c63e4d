"""The command line in this process, with its own cache and a tiny model that speaks."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bankfull.cli.app import run_command
from bankfull.limits.machine.ceilings import Ceilings
from tests.tiny import speaking_folder


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def sentence(self) -> str:
        """What a refused input got: exit code 2, nothing on stdout, one line on stderr."""
        assert self.code == 2, (self.out, self.err)
        assert self.out == ""
        assert self.err.startswith("bankfull: ") and self.err.count("\n") == 1, self.err
        return self.err


Cli = Callable[..., Done]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("BANKFULL_CACHE", str(folder))
    monkeypatch.setenv("BANKFULL_CONFIG", str(tmp_path / "config"))
    return folder


@pytest.fixture(autouse=True)
def ceilings(monkeypatch: pytest.MonkeyPatch) -> Ceilings:
    """A machine whose limits are known, so that no test waits for a measurement."""
    flops = dict.fromkeys(("float32", "bfloat16", "float16", "float64"), 1e11)
    known = Ceilings(1e10, 1e10, flops, 1, "a cpu", "today", 10**9, 10**8, 10**7)
    monkeypatch.setattr("bankfull.limits.machine.ceilings.measure", lambda refresh=False, budget=2.0: known)
    return known


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    def call(*arguments: object, stdin: str | bytes = "") -> Done:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        capsys.readouterr()
        code = run_command([str(argument) for argument in arguments])
        return Done(code, *capsys.readouterr())

    return call


@pytest.fixture(scope="session")
def model() -> Path:
    return speaking_folder()


@pytest.fixture
def mute(model: Path, tmp_path: Path) -> Path:
    """The same model without its chat template."""
    folder = tmp_path / "mute"
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
