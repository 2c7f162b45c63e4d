"""Every process, thread and task of a server has an owner, which starts it again or ends the whole with a reason."""

from __future__ import annotations

import ast
import asyncio
import io
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import bankfull
from bankfull import LLM, AsyncEngine, SamplingParams
from bankfull.serve.engine import worker as worker_module
from bankfull.serve.engine.engine_end import Outbox
from bankfull.serve.telemetry.log import Logs
from tests.tiny import speaking_folder

OWNERS = {
    # file: {what is started: (how often, who owns it)}
    "aio.py": {"Thread": (1, "AsyncEngine: its end is every caller's error, then and later")},
    "cluster/manager_process.py": {"create_subprocess_exec": (1, "ManagedSet._supervise: started again")},
    "cluster/replica.py": {"Thread": (1, "the replica's process, which ends with it and is started again by Ray")},
    "loading.py": {"ThreadPoolExecutor": (1, "load, which waits for it")},
    "ops/triton/ahead.py": {"ThreadPoolExecutor": (1, "compile_ahead, which waits for it")},
    "parallel/hosting.py": {
        "create_subprocess_exec": (1, "rank 0: the end of a rank ends its engine, which starts all")
    },
    "parallel/leading.py": {"Popen": (1, "rank 0: the end of a rank ends its engine, which starts all")},
    "parallel/placing.py": {"Popen": (1, "RayPlaces: its end ends the ranks that it has placed")},
    "parallel/rank.py": {"Thread": (1, "the rank's process, which it ends; the end of a rank ends its engine")},
    "parallel/reaching.py": {"ThreadPoolExecutor": (1, "RankHosts.connect, which waits for it")},
    "tasks.py": {"create_task": (1, "the owner of OwnTasks, which is told and logs it; ManagedSet ends")},
    "state/disk_budget.py": {"Thread": (1, "DiskBudget: its end leaves the size as it is")},
    "weights/file_digests.py": {"ThreadPoolExecutor": (1, "digest_of, which waits for it")},
    "weights/fingerprint.py": {"Thread": (1, "begun_fingerprint, whose reader waits for it and gets its error")},
    "runtime/mover.py": {
        "Thread": (1, "Mover: a transfer's failure is told to the scheduler, which computes it again")
    },
    "sample/grammar.py": {
        "ThreadPoolExecutor": (1, "MaskPool: a failure is raised where the mask is used"),
        "Thread": (1, "compile, which waits for it"),
    },
    "serve/answers/store.py": {
        "ThreadPoolExecutor": (1, "the store: a failure is raised where the answer is asked for")
    },
    "serve/app.py": {"ensure_future": (1, "the request that it watches for")},
    "serve/batch/runner.py": {
        "create_task": (3, "the batch's task, which the supervisor keeps"),
        "ensure_future": (1, "the batch's task, which waits for it"),
    },
    "serve/engine/keeper.py": {
        "create_task": (1, "EngineKeeper._orphan: the server ends with the reason"),
    },
    "serve/engine/process.py": {
        "Popen": (1, "EngineKeeper._supervise: started again"),
        "ensure_future": (1, "EngineConnection.until_ended, which raises its failure"),
    },
    "serve/engine/gateway.py": {
        "create_subprocess_exec": (1, "the session: its end ends the server's connection, and Link starts another"),
        "create_task": (1, "the session, whose control connection it reads"),
    },
    "serve/guard/listen.py": {"create_task": (1, "the connection, whose handshake it is: it ends with it")},
    "serve/api/openai/completions.py": {"ensure_future": (2, "the request whose prompts they run")},
    "serve/desk.py": {"Thread": (1, "Desk: whoever waits is told of a failure; a thread that ends is replaced")},
    "handshake/link_tls.py": {"ensure_future": (2, "relay, which ends with either of them")},
    "serve/engine/engine_end.py": {
        "Thread": (1, "the engine process, which ends with the reason and is started again")
    },
    "serve/run.py": {"ensure_future": (1, "run_server: whatever ends it ends the server")},
    "serve/api/sse.py": {"create_task": (1, "the stream")},
    "serve/data/store.py": {"ThreadPoolExecutor": (1, "Store: a failure is raised where the work is awaited")},
    "serve/supervise.py": {"create_task": (2, "Supervisor: begun again, and told of; test_supervise.py ends them")},
    "serve/engine/worker.py": {
        "Thread": (2, "the engine process, which ends with the reason and is started again"),
    },
    "state/page_listener.py": {"Thread": (2, "PageListener: what does not arrive through it is computed again")},
    "text/render_process.py": {"Popen": (1, "RenderProcess: another is started with the next call")},
    "weights/store.py": {"Thread": (1, "PreparedWeights: its end is told, and leaves the next start as this one")},
    "weights/fetch.py": {"Popen": (1, "fetch, which waits for it")},
}
STARTS = (
    "Thread",
    "Timer",
    "Process",
    "Popen",
    "ThreadPoolExecutor",
    "ProcessPoolExecutor",
    "create_task",
    "ensure_future",
    "create_subprocess_exec",
    "start_new_thread",
)
SERVED = (
    "aio.py",
    "cluster",
    "loading.py",
    "loop.py",
    "engine.py",
    "handshake",
    "ops",
    "parallel",
    "runtime",
    "sample",
    "serve",
    "state",
    "tasks.py",
    "text",
    "weights",
)


def started_in(source: str) -> Counter[str]:
    calls = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    names = (call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "") for call in calls)
    return Counter(name for name in names if name in STARTS)


def test_whatever_is_started_has_an_owner() -> None:
    """Whoever starts a process, a thread or a task says here who restarts it, or ends with it, and tests that."""
    root = Path(bankfull.__file__).parent
    found = {}
    for place in SERVED:
        for file in [root / place] if place.endswith(".py") else sorted((root / place).rglob("*.py")):
            if started := started_in(file.read_text()):
                found[str(file.relative_to(root))] = dict(started)
    assert found == {file: {kind: n for kind, (n, _) in kinds.items()} for file, kinds in OWNERS.items() if kinds}


# -- processes


class Server:
    """`bankfull serve` on a tiny model that can be taken away."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.model = folder / "model"
        shutil.copytree(speaking_folder(), self.model)
        command = [sys.executable, "-m", "bankfull", "serve", str(self.model), "--port", "0"]
        command += ["--served-model-name", "tiny"]
        command += ["--dtype", "float32", "--memory", "1MiB", "--page-tokens", "4", "--threads", "1", *options]
        self.errors = (folder / "errors").open("w+")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.errors, text=True)
        assert self.process.stdout is not None
        self.url = next(line.split()[-1] for line in self.process.stdout if "browser" in line).rstrip("/")

    def get(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(asked, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def chat(self, words: int = 1) -> int:
        messages = [{"role": "user", "content": "river " * words}]
        body = {"model": "tiny", "messages": messages, "max_tokens": 2, "truncate_prompt_tokens": -1}
        return self.get("/v1/chat/completions", body)[0]

    def children(self) -> dict[int, str]:
        """By the module that each runs."""
        listed = subprocess.run(
            ["ps", "-o", "pid=,args=", "--ppid", str(self.process.pid)], capture_output=True, text=True, check=False
        ).stdout
        rows = [line.split() for line in listed.splitlines()]
        return {int(row[0]): row[row.index("-m") + 1] for row in rows if "-m" in row}

    def said(self) -> str:
        self.errors.seek(0)
        return self.errors.read()


@contextmanager
def served(folder: Path, *options: str) -> Iterator[Server]:
    server = Server(folder, *options)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def until(true: Callable[[], bool], seconds: float = 120.0) -> None:
    ends = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < ends, "it never came true"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="children are listed as on Linux")
def test_each_process_of_a_server_is_started_again_and_none_outlives_it(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        assert server.chat() == 200 and server.chat(20_000) in (200, 400)
        before = server.children()
        kinds = sorted(before.values())
        assert kinds == ["bankfull.serve.engine.worker", "bankfull.text.render_worker", "bankfull.text.render_worker"]
        for pid in before:
            os.kill(pid, signal.SIGKILL)
            until(lambda: server.chat() == 200)
            server.chat(20_000)
            until(lambda: sorted(server.children().values()) == kinds)
        after = server.children()
        assert not before.keys() & after.keys()
        server.process.kill()
        server.process.wait()
        until(lambda: not any(map(alive, after)))


@pytest.mark.full
def test_a_server_whose_model_stays_away_ends_with_the_reason_where_that_is_asked_for(tmp_path: Path) -> None:
    with served(tmp_path, "--give-up-after", "8") as server:
        [engine] = [pid for pid, module in server.children().items() if module == "bankfull.serve.engine.worker"]
        server.model.rename(tmp_path / "away")
        os.kill(engine, signal.SIGKILL)
        said: set[str] = set()
        while server.process.poll() is None:
            try:
                (status, answer), (live, _) = server.get("/ready"), server.get("/live")
            except OSError:
                continue  # the server has ended
            said.add(answer)
            assert status in (200, 503) and str(tmp_path) not in answer and live == 200
            time.sleep(0.05)
        assert server.process.wait() not in (0, None)
        assert any("again" in answer for answer in said)
        told = server.said()
        assert "no engine for 8 seconds" in told and "Traceback" not in told


# -- threads of the engine process


class Left(BaseException):
    """In the place of the process' end."""


def test_an_engine_whose_watcher_fails_ends_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def leave(status: int) -> None:
        raise Left(status)

    class Broken:
        def register(self, *given: object) -> None:
            raise RuntimeError("a defect")

    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker = worker_module.Worker(theirs)
        monkeypatch.setattr(worker_module, "_leave", leave)
        monkeypatch.setattr(worker_module.select, "poll", Broken)
        with pytest.raises(Left, match="1"):
            worker._until_gone()
    assert "bankfull-watcher has failed: RuntimeError('a defect')" in capsys.readouterr().err


def test_an_engine_whose_writer_fails_ends_with_the_reason() -> None:
    class Odd:
        def send(self, message: bytes, flags: int) -> int:
            raise BlockingIOError

        def sendall(self, message: bytes) -> None:
            raise RuntimeError("a defect")

    told: list[tuple[str, BaseException]] = []
    happened = threading.Event()

    def give_up(thread: str, error: BaseException) -> None:
        told.append((thread, error))
        happened.set()

    Outbox(Odd(), give_up).send(b"hello")  # type: ignore[arg-type]
    assert happened.wait(60)
    assert [(thread, str(error)) for thread, error in told] == [("bankfull-writer", "a defect")]


# -- others


def test_the_log_outlives_a_line_that_cannot_be_written() -> None:
    class Odd(io.StringIO):
        def write(self, text: str) -> int:
            if "bad" in text:
                raise RecursionError("deep")  # the one that logging itself lets through
            return super().write(text)

    stream = Odd()
    logs = Logs(stream=stream)
    try:
        for line in ("first", "bad", "last"):
            logging.getLogger("bankfull.test").warning(line)
        until(lambda: "last" in stream.getvalue())
        assert "first" in stream.getvalue() and logs.dropped == 1
    finally:
        logs.close()


def test_an_asyncio_engine_whose_thread_fails_tells_everybody_then_and_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    engine = AsyncEngine(LLM(str(speaking_folder()), dtype="float32", memory="1MiB", page_tokens=4))
    step = engine._front.step

    def broken() -> Any:
        if len(engine._listeners) == 2:
            raise RuntimeError("a defect")
        return step()

    async def ask() -> list[str]:
        params = SamplingParams(seed=1, ignore_eos=True)
        monkeypatch.setattr(engine._front, "step", broken)
        streams = [engine.generate("The river", params) for _ in range(2)]
        told = []

        async def read(stream: Any) -> None:
            with pytest.raises(RuntimeError) as caught:
                async for _ in stream:
                    pass
            told.append(str(caught.value))

        await asyncio.gather(*map(read, streams))
        await read(engine.generate("The river", params))
        return told

    told = asyncio.run(asyncio.wait_for(ask(), 120))
    assert told[:2] == ["a defect"] * 2 and "a defect" in told[2]
