"""Real models beside llama.cpp: `make test-real`. Not part of `make test`: 1.9 GB of files, an hour of two cores."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from benchmarks.cpu_peers.llamacpp_package import installed
from tests.real.models import REAL

if os.environ.get("BANKFULL_REAL") != "1":
    collect_ignore_glob = ["test_*.py"]

PEER = Path(__file__).with_name("peer.py")
THREADS = len(os.sched_getaffinity(0))
MODELS = [name for name in REAL if name in os.environ.get("BANKFULL_REAL_MODELS", ",".join(REAL)).split(",")]
CHATTING, BASE = ([name for name in MODELS if REAL[name].chats is chats] for chats in (True, False))


@dataclass(frozen=True, slots=True)
class Greedy:
    """What llama.cpp continues with."""

    tokens: list[int]
    leads: list[float]
    """Of each token's logit over the second best."""
    text: str


class LlamaCpp:
    """llama.cpp with one model, in its own process."""

    def __init__(self, model: Path, context: int) -> None:
        python = installed()
        if python is None:
            pytest.skip("llama.cpp is not installed: make test-real compiles it once")
        self._process = subprocess.Popen(
            [str(python), str(PEER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._send({"model": str(model), "context": context, "threads": THREADS})

    def greedy(self, tokens: Sequence[int], count: int, stop: Sequence[str] = ()) -> Greedy:
        assert self._process.stdout is not None
        self._send({"tokens": list(tokens), "count": count, "stop": list(stop)})
        return Greedy(**json.loads(self._process.stdout.readline()))

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@dataclass(frozen=True, slots=True)
class Served:
    """`bankfull serve` with a model and its default options."""

    url: str
    name: str
    client: openai.OpenAI


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def file(model: str) -> Path:
    path = REAL[model].path
    if not path.is_file():
        pytest.skip(f"{path.name} is not in the cache: python -m tests.real.models {model} fetches it")
    return path


@pytest.fixture(scope="module")
def server(file: Path) -> Iterator[Served]:
    command = [sys.executable, "-m", "bankfull", "serve", str(file), "--port", "0", "--max-model-len", "32768"]
    variables = {name: value for name, value in os.environ.items() if name != "BANKFULL_SPECULATIVE"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables)
    assert process.stdout is not None
    try:
        lines: list[str] = []
        while (line := process.stdout.readline()) and not (found := re.search(r"base_url (http://[\d.:]+)/v1", line)):
            lines.append(line)
        assert line and found, f"the server did not start: {lines}"
        client = openai.OpenAI(base_url=found[1] + "/v1", api_key="none", max_retries=0, timeout=1200)
        yield Served(found[1], client.models.list().data[0].id, client)
    finally:
        process.kill()
        process.wait()
