"""A whole server with two engine processes: clients see one service, which outlives each of its engines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import speaking_folder

SERVE = """
import sys
from bankfull.serve.guard.checks import access_policy
from bankfull.serve.guard.keys import Keyring
from bankfull.serve.guard.layers import Protection
from bankfull.cluster.local_replicas import local_replicas
from bankfull.fleet.replica_range import ReplicaRange
from bankfull.serve.run import Deployment, run_server
from bankfull.serve.settings import Settings

run_server(
    Deployment(
        model=sys.argv[1],
        options={"dtype": "float32", "memory": "1MiB", "page_tokens": 4, "threads": 1},
        settings=Settings(names=("tiny",), port=0),
        protection=Protection(access=access_policy(Keyring(), host="127.0.0.1")),
        replicas=local_replicas(ReplicaRange(int(sys.argv[2]), int(sys.argv[2])), "least-loaded"),
    )
)
"""
TOKENS = 150
ATTEMPTS = 20


class ServedReplicas:
    def __init__(self, count: int = 2) -> None:
        command = [sys.executable, "-c", SERVE, str(speaking_folder()), str(count)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3])
        assert self.process.stdout is not None
        self.url = next(line.split()[-1] for line in self.process.stdout if "browser" in line).rstrip("/")

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            body: bytes = answer.read()
        return body.decode()

    def replicas(self) -> list[dict[str, Any]]:
        replicas: list[dict[str, Any]] = json.loads(self.get("/console/state"))["replicas"]
        return replicas

    def until_all_ready(self) -> None:
        ends = time.monotonic() + 120
        while {replica["state"] for replica in self.replicas()} != {"ready"}:
            assert time.monotonic() < ends, "a replica never became ready"
            time.sleep(0.05)

    def engines(self) -> list[int]:
        listed = subprocess.run(
            ["ps", "-o", "pid=,args=", "--ppid", str(self.process.pid)], capture_output=True, text=True, check=False
        ).stdout
        return [int(line.split()[0]) for line in listed.splitlines() if "bankfull.serve.engine.worker" in line]

    def gateways(self) -> list[int]:
        return []  # the engines are child processes

    def stream(self, seed: int, begun: threading.Barrier | None = None) -> list[str]:
        """The tokens of a streamed completion; `begun` is passed with the first event."""
        body = {"model": "tiny", "prompt": "The river", "max_tokens": TOKENS, "seed": seed, "ignore_eos": True}
        body |= {"stream": True, "logprobs": 0}
        data = json.dumps(body).encode()
        asked = urllib.request.Request(self.url + "/v1/completions", data, {"content-type": "application/json"})
        pieces: list[str] = []
        with urllib.request.urlopen(asked, timeout=120) as answer:
            for line in answer:
                if not line.startswith(b"data: ") or b"[DONE]" in line:
                    continue
                event = json.loads(line[6:])
                assert "error" not in event, event
                for choice in event["choices"]:
                    pieces += (choice.get("logprobs") or {}).get("tokens", [])
                if begun is not None and pieces:
                    begun.wait(60)
                    begun = None
        return pieces


@pytest.fixture(scope="module")
def server() -> Iterator[ServedReplicas]:
    made = ServedReplicas()
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="children are listed as on Linux")
def test_clients_do_not_notice_that_an_engine_is_killed(server: ServedReplicas) -> None:
    server.until_all_ready()
    usual = [server.stream(seed) for seed in (1, 2)]
    assert [len(tokens) for tokens in usual] == [TOKENS, TOKENS] and usual[0] != usual[1]
    with ThreadPoolExecutor(2) as pool:
        for attempt in range(ATTEMPTS):
            # Two streams at once run on two replicas; the killed one may have been done already.
            begun = threading.Barrier(3)
            streams = [pool.submit(server.stream, seed, begun) for seed in (1, 2)]
            begun.wait(60)
            os.kill(server.engines()[attempt % 2], signal.SIGKILL)
            assert [stream.result(120) for stream in streams] == usual
            server.until_all_ready()
            if any(replica["resumed"] for replica in server.replicas()):
                break
        else:
            pytest.fail("no stream was resumed")
    assert 'bankfull:replica_ready{model_name="tiny",replica="replica-2"} 1' in server.get("/metrics")
    assert json.loads(server.get("/console/state"))["facts"]["rows"] == 2 * server.replicas()[0]["rows"]
