"""`bankfull serve --replicas` on a tiny model, and the processes it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.tiny import speaking_folder

ENGINE = "bankfull.serve.engine.worker"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "seed": 7, "temperature": 1.0}


def until(true: Callable[[], bool], seconds: float = 90.0) -> None:
    ends = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < ends, "it never came true"
        time.sleep(0.05)


def processes(variable: str) -> dict[int, str]:
    """Process ids and command lines of those that have inherited this entry of the environment."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if variable.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return found


def ticks(pid: int) -> int:
    """Processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


class ClusterServer:
    """A server with replicas, in an environment that marks all of its processes."""

    def __init__(self, folder: Path, *options: str, without_ray: bool = False, **variables: str) -> None:
        folder.mkdir(exist_ok=True)
        if not without_ray and "--ray" not in options and "RAY_ADDRESS" not in variables:
            options = (*options, "--ray", "local")
        self.mark = f"BANKFULL_DATA={folder}"
        self.environment = {**os.environ, "BANKFULL_DATA": str(folder), **variables}
        command = [sys.executable, "-m", "bankfull", "serve", str(speaking_folder()), "--port", "0"]
        command += ["--served-model-name", "tiny", "--dtype", "float32", "--memory", "1MiB", "--page-tokens", "4"]
        self.errors = (folder / "errors").open("w+")
        self.process = subprocess.Popen(
            [*command, "--threads", "1", *options],
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=self.environment,
        )
        assert self.process.stdout is not None
        line = next((line for line in self.process.stdout if "browser" in line), "")
        self.url = line.split()[-1].rstrip("/") if line else ""

    def said(self) -> str:
        self.errors.seek(0)
        return self.errors.read()

    def cluster(self, *command: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-m", "bankfull", "cluster", *command],
            capture_output=True,
            text=True,
            env=self.environment,
            timeout=120,
        )
        return done.returncode, done.stdout, done.stderr

    def status(self) -> dict[str, Any]:
        code, out, error = self.cluster("status", "--json")
        assert code == 0, error
        told: dict[str, Any] = json.loads(out)
        return told

    def states(self) -> dict[str, str]:
        return {replica["name"]: replica["state"] for replica in self.status()["replicas"]}

    def engines(self) -> list[int]:
        return [pid for pid, command in processes(self.mark).items() if ENGINE in command]

    def gateways(self) -> list[int]:
        """The processes of Ray's actors."""
        return [pid for pid, command in processes(self.mark).items() if command.startswith("ray::EngineReplica")]

    def replicas(self) -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"{self.url}/console/state", timeout=60) as answer:
            replicas: list[dict[str, Any]] = json.load(answer)["replicas"]
        return replicas

    def stream(self, tokens: int) -> Iterator[str]:
        """The text of an answer, part by part; raises what the server reports."""
        body = {**BODY, "max_tokens": tokens, "stream": True, "ignore_eos": True}
        head = {"content-type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/chat/completions", json.dumps(body).encode(), head)
        with urllib.request.urlopen(request, timeout=60) as lines:
            for line in lines:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    yield event["choices"][0]["delta"].get("content") or ""

    def answer(self, tokens: int) -> str:
        return "".join(self.stream(tokens))

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


def answer_with_kill(server: ClusterServer, tokens: int) -> str:
    """An answer whose engine is killed after a few tokens: the one that has used more processor time since its begin.
    Both are stopped first, so that none can finish it meanwhile."""
    engines = server.engines()
    before = {pid: ticks(pid) for pid in engines}
    parts = server.stream(tokens)
    got = [next(parts) for _ in range(3)]
    for pid in engines:
        os.kill(pid, signal.SIGSTOP)
    busy = max(engines, key=lambda pid: ticks(pid) - before[pid])
    os.kill(busy, signal.SIGKILL)
    for pid in set(engines) - {busy}:
        os.kill(pid, signal.SIGCONT)
    return "".join([*got, *parts])


class Clients:
    """Threads that ask all the time; each keeps the answers and the errors that it got."""

    def __init__(self, server: ClusterServer, count: int, tokens: int) -> None:
        self._server, self._tokens = server, tokens
        self._stop = threading.Event()
        self.answers: list[str] = []
        self.errors: list[Exception] = []
        self._threads = [threading.Thread(target=self._ask) for _ in range(count)]

    def _ask(self) -> None:
        while not self._stop.is_set():
            try:
                self.answers.append(self._server.answer(self._tokens))
            except Exception as error:
                self.errors.append(error)

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *how: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


@contextmanager
def serving(folder: Path, *options: str, without_ray: bool = False, **variables: str) -> Iterator[ClusterServer]:
    server = ClusterServer(folder, *options, without_ray=without_ray, **variables)
    try:
        assert server.url, server.said()
        yield server
    finally:
        if server.process.poll() is None:
            server.close()
        until(lambda: not processes(server.mark), 30.0)
