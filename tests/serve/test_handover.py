"""A server is replaced by another one on the same port, and no client notices."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bankfull.serve.handover import Predecessor, Successor, note_of, same_user
from tests.tiny import speaking_folder

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "seed": 7, "ignore_eos": True}


def until(true: Callable[[], bool], seconds: float = 90.0) -> None:
    ends = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < ends, "it never came true"
        time.sleep(0.05)


class Served:
    def __init__(self, folder: Path, port: int, *options: str) -> None:
        command = [sys.executable, "-m", "bankfull", "serve", str(speaking_folder()), "--port", str(port)]
        command += ["--served-model-name", "tiny", "--dtype", "float32", "--memory", "1MiB", "--threads", "1"]
        self.errors = (folder / f"errors-{os.urandom(4).hex()}").open("w+")
        self.process = subprocess.Popen(
            [*command, *options],
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env={**os.environ, "BANKFULL_DATA": str(folder)},
        )
        assert self.process.stdout is not None
        self.ready = any("browser" in line for line in self.process.stdout)

    def said(self) -> str:
        self.errors.seek(0)
        return self.errors.read()


@contextmanager
def servers(folder: Path) -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def start(port: int, *options: str) -> Served:
        started.append(Served(folder, port, *options))
        return started[-1]

    try:
        yield start
    finally:
        for server in started:
            if server.process.poll() is None:
                server.process.send_signal(signal.SIGTERM)
        for server in started:
            server.process.wait(60)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def call(connection: http.client.HTTPConnection, method: str, path: str, body: object = None) -> tuple[int, bytes]:
    data = None if body is None else json.dumps(body)
    connection.request(method, path, data, {"content-type": "application/json"})
    answer = connection.getresponse()
    return answer.status, answer.read()


class Hammer:
    """Threads that call all the time: with a new connection each time, or with one that is kept."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._stop = threading.Event()
        self.counts = [0, 0, 0]
        self.errors: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(3)]

    def _run(self, number: int) -> None:
        kept = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        while not self._stop.is_set():
            try:
                connection = kept
                if number == 0:
                    connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
                path, body = ("/v1/chat/completions", {**BODY, "max_tokens": 20}) if number < 2 else ("/version", None)
                status, text = call(connection, "GET" if body is None else "POST", path, body)
                if status != 200:
                    self.errors.append(f"{status} {text!r}")
                self.counts[number] += 1
                if number == 0:
                    connection.close()
                time.sleep(0.002)
            except Exception as error:
                self.errors.append(f"{number}: {error!r}")
                kept.close()

    def __enter__(self) -> Hammer:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *how: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def stream(port: int, tokens: int) -> Iterator[str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {**BODY, "max_tokens": tokens, "stream": True}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            assert "error" not in event, event
            yield event["choices"][0]["delta"].get("content") or ""


def test_no_connection_is_refused_while_another_server_takes_over(tmp_path: Path) -> None:
    port = free_port()
    with servers(tmp_path) as start:
        old = start(port)
        assert old.ready, old.said()
        expected = "".join(stream(port, 200))
        uploaded = _upload(port)
        with Hammer(port) as hammer:
            until(lambda: min(hammer.counts) > 5)
            parts = stream(port, 200)
            got = [next(parts)]
            new = start(port, "--take-over")
            assert new.ready, new.said()
            got.extend(parts)
            before = list(hammer.counts)
            until(lambda: all(now > then + 5 for now, then in zip(hammer.counts, before, strict=True)))
            assert old.process.wait(60) == 0, old.said()
        assert hammer.errors == []
        assert "".join(got) == expected, "a stream of the old server is finished there"
        assert new.process.poll() is None
        told = json.loads((tmp_path / "handover" / f"{port}.json").read_text())
        assert told["pid"] == new.process.pid
        assert _files(port) == [uploaded], "files move with the port"
        assert "".join(stream(port, 200)) == expected


def _upload(port: int) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    head = {"content-type": "multipart/form-data; boundary=x"}
    body = (
        '--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        '--x\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n{}\r\n--x--\r\n'
    )
    connection.request("POST", "/v1/files", body, head)
    answer = connection.getresponse()
    assert answer.status == 200
    identity: str = json.loads(answer.read())["id"]
    return identity


def _files(port: int) -> list[str]:
    status, text = call(http.client.HTTPConnection("127.0.0.1", port, timeout=60), "GET", "/v1/files")
    assert status == 200, text
    return [file["id"] for file in json.loads(text)["data"]]


@pytest.mark.full
def test_a_server_that_cannot_take_over_says_why_and_the_old_one_goes_on(tmp_path: Path) -> None:
    port = free_port()
    with servers(tmp_path) as start:
        nobody = start(port, "--take-over")
        assert not nobody.ready and nobody.process.wait(30) != 0
        assert f"There is no server of this user on port {port} to take over from" in nobody.said()

        old = start(port)
        assert old.ready, old.said()
        expected = "".join(stream(port, 20))
        other = start(port, "--take-over", "--data-dir", str(tmp_path / "other"))
        assert not other.ready and other.process.wait(30) != 0 and "give the same" in other.said()
        broken = start(port, "--take-over", "--dtype", "float99")
        assert not broken.ready and broken.process.wait(60) != 0
        assert "".join(stream(port, 20)) == expected and old.process.poll() is None


def hand_over(tmp_path: Path, steps: Callable[[Successor], Coroutine[Any, Any, None]]) -> list[str]:
    """What the old server does while a new one takes these steps and then ends."""
    done: list[str] = []

    async def release() -> None:
        done.append("release")

    async def both() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listening.setblocking(False)
            port = listening.getsockname()[1]
            old = Predecessor(listening, "127.0.0.1", tmp_path, release=release, leave=lambda: done.append("leave"))
            old.announce()
            running = asyncio.ensure_future(old.run())
            new = Successor(port, "127.0.0.1", tmp_path)
            await steps(new)
            new.close()
            await asyncio.sleep(0.05)
            assert not running.done(), "another server can still take over"
            running.cancel()
            old.close()
            assert not note_of(port).exists()

    asyncio.run(both())
    return done


async def _all_steps(new: Successor) -> None:
    with await new.listener() as listening:
        assert not listening.getblocking(), "the old server would block in its next accept"
        with listening.dup() as second:
            assert not second.getblocking()
    await new.release()
    await new.leave()


async def _listener_only(new: Successor) -> None:
    (await new.listener()).close()


async def _without_leave(new: Successor) -> None:
    (await new.listener()).close()
    await new.release()


@pytest.mark.parametrize(
    ("steps", "done"),
    [(_all_steps, ["release", "leave"]), (_listener_only, []), (_without_leave, ["release"])],
)
def test_the_old_server_leaves_only_when_the_new_one_accepts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    steps: Callable[[Successor], Coroutine[Any, Any, None]],
    done: list[str],
) -> None:
    monkeypatch.setenv("BANKFULL_DATA", str(tmp_path))
    assert hand_over(tmp_path, steps) == done
    assert ("without files and batches" in caplog.text) == (done == ["release"])


def test_only_the_same_user_gets_the_socket() -> None:
    one, two = socket.socketpair()
    with one, two:
        assert same_user(one)


def test_the_note_is_in_the_users_data_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BANKFULL_DATA", str(tmp_path))
    assert note_of(8000) == tmp_path / "handover" / "8000.json"
