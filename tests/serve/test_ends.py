"""Ends before their time: clients that leave, keys that are taken out, a server that stops or is told to read its files
again. Whoever is still there is told."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from bankfull.serve.app import create_app
from bankfull.serve.engine.backend import STOPPED, Unavailable
from bankfull.serve.guard.checks import access_policy
from bankfull.serve.guard.keys import Keyring, new_key
from bankfull.serve.guard.layers import protect
from bankfull.serve.guard.reload import Reloader
from bankfull.serve.telemetry.metrics import ServiceMetrics
from bankfull.serve.telemetry.trace import Running
from bankfull.serve.telemetry.watch import WatchedBackend
from bankfull.submit import Submit
from tests.serve.batch.test_batches import client_at, line, submit
from tests.serve.batch_app import RandomHandler, batch_app
from tests.serve.guard.test_keys import Clock
from tests.serve.listening import listening
from tests.serve.scripted import Scripted, scripted_texts, settings
from tests.serve.server import served
from tests.tiny import speaking_folder

CALLS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 100},
}
OPTIONS = ["--dtype", "float32", "--memory", "4MiB", "--page-tokens", "4", "--rows", "8"]


def eventually(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


class House:
    """The whole application over a scripted engine, as it runs."""

    def __init__(self, inner: Scripted, keyring: Keyring | None = None) -> None:
        self.inner, self.metrics, self.running = inner, ServiceMetrics(), Running()
        keyring = keyring or Keyring()
        backend = WatchedBackend(inner, self.metrics, keyring)
        app = create_app(backend, scripted_texts(), settings())
        access = access_policy(keyring, host="127.0.0.1")
        self.app = protect(app, backend, access, self.metrics, running=self.running)
        self.loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.loop = asyncio.get_running_loop()
        await self.app(scope, receive, send)

    def do(self, work: Callable[[], Any]) -> None:
        """On the event loop's thread, and when it has been done."""

        async def done() -> None:
            work()

        assert self.loop is not None
        asyncio.run_coroutine_threadsafe(done(), self.loop).result(30)

    @property
    def statuses(self) -> dict[str, float]:
        return {labels[2]: count for labels, count in self.metrics.http_requests.values.items()}


# -- clients that leave


class Breaking(Scripted):
    """An engine whose steps cannot be left without an exception, as an asynchronous generator's sometimes cannot."""

    def generate(self, submit: Submit) -> Any:
        steps = super().generate(submit)

        class Steps:
            def __aiter__(self) -> Any:
                return self

            async def __anext__(self) -> Any:
                return await steps.__anext__()

            async def aclose(self) -> None:
                await steps.aclose()
                raise RuntimeError("aclose(): asynchronous generator is already running")

        return Steps()


@pytest.mark.parametrize("engine", [Scripted, Breaking])
@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_before_the_first_token_is_no_error_of_the_server(
    path: str, stream: bool, engine: type[Scripted], caplog: pytest.LogCaptureFixture
) -> None:
    house = House(engine(["x"] * 100, pause=30.0))
    with listening(house) as server:
        body = json.dumps({**CALLS[path], "stream": stream}).encode()
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            eventually(lambda: house.inner.running == 1, "the engine has not heard of it")
        eventually(lambda: house.inner.running == 0 and bool(house.statuses), "it goes on")
    assert house.statuses == {"499": 1}
    assert "unexpected error" not in caplog.text and "Exception in ASGI application" not in caplog.text


# -- ends that the server makes


def open_stream(url: str, path: str, headers: dict[str, str] | None = None) -> Any:
    return httpx.stream("POST", url + path, json={**CALLS[path], "stream": True}, timeout=30, headers=headers)


@pytest.mark.parametrize("path", CALLS)
def test_a_stream_that_the_server_ends_has_an_error_event_and_a_whole_answer_is_503(path: str) -> None:
    house = House(Scripted(["x"] * 1000, pause=0.05))
    with listening(house) as server:
        with open_stream(server.url, path) as response:
            pieces = response.iter_bytes()
            next(pieces)
            house.do(lambda: house.running.end(Unavailable(STOPPED)))
            rest = b"".join(pieces)
        assert STOPPED.encode() in rest and b"error" in rest
        house.inner.pause = 30.0
        with ThreadPoolExecutor(2) as pool:
            calls = [{**CALLS[path], "stream": stream} for stream in (False, True)]
            asked = [pool.submit(httpx.post, server.url + path, json=call, timeout=30) for call in calls]
            eventually(lambda: house.inner.running == 2, "the engine has not heard of them")
            house.do(lambda: house.running.end(Unavailable(STOPPED)))
            answers = [one.result(30) for one in asked]
    for answer in answers:
        assert answer.status_code == 503 and answer.headers["content-type"] == "application/json"
        assert STOPPED in answer.json()["error"]["message"]
    assert house.metrics.failures.values == {("Unavailable",): 3} and "500" not in house.statuses
    assert len(house.running) == 0


def test_calls_of_a_key_that_is_taken_out_end_and_those_of_others_go_on(tmp_path: Path) -> None:
    clock, file = Clock(), tmp_path / "keys.txt"
    (alice, alice_key), (bob, bob_key) = new_key("alice"), new_key("bob")
    file.write_text(f"{alice_key.line}\n{bob_key.line}\n")
    keyring = Keyring(file=file, clock=clock)
    house = House(Scripted(["x"] * 40, pause=0.1), keyring)
    ended: list[str] = []

    async def end_work(owners: Any) -> None:
        ended.extend(owners)

    reloader = Reloader(keyring, None, house.running, end_work)
    with (
        listening(house) as server,
        open_stream(server.url, "/v1/completions", {"x-api-key": alice}) as first,
        open_stream(server.url, "/v1/completions", {"x-api-key": bob}) as second,
    ):
        firsts, seconds = first.iter_bytes(), second.iter_bytes()
        next(firsts), next(seconds)
        file.write_text("")  # an editor begins to write it
        os.utime(file, ns=(1, 1))
        clock.now += 5
        house.do(reloader.reload)
        assert len(keyring._pending_removal) == 2
        file.write_text(f"{bob_key.line}\n")
        os.utime(file, ns=(2, 2))
        clock.now += 5
        house.do(reloader.reload)
        clock.now += 5
        house.do(reloader.reload)
        rest = b"".join(firsts)
        assert b"invalid_api_key" in rest and b"revoked" in rest and rest.endswith(b"data: [DONE]\n\n")
        whole = b"".join(seconds)
        assert b"error" not in whole and b'"finish_reason":"stop"' in whole
    assert reloader._revoked == {"alice"}


def test_a_key_is_gone_when_the_file_has_settled_and_at_once_when_somebody_says_so(tmp_path: Path) -> None:
    clock, file = Clock(), tmp_path / "keys.txt"
    _, alice = new_key("alice")
    _, bob = new_key("bob")
    told: list[set[str]] = []
    file.write_text(f"{alice.line}\n{bob.line}\n")
    keyring = Keyring(file=file, clock=clock)
    keyring.removed.append(lambda keys: told.append({key.name for key in keys}))

    def write(*lines: str) -> None:
        file.write_text("\n".join(lines))
        os.utime(file, ns=(int(clock.now), int(clock.now)))

    write(bob.line)
    clock.now += 3
    keyring.reload()
    assert told == [], "it may be in the middle of being written"
    write(alice.line, bob.line)
    clock.now += 3
    keyring.reload()
    clock.now += 3
    keyring.reload()
    assert told == [], "and it was"
    write(bob.line)
    clock.now += 3
    keyring.reload()
    clock.now += 3
    keyring.reload()
    assert told == [{"alice"}]
    clock.now += 3
    keyring.reload()
    assert told == [{"alice"}], "once"
    write(new_key("bob")[1].line)
    keyring.reload(force=True)
    assert told == [{"alice"}, {"bob"}], "another key with the same name"


def test_batches_of_a_key_that_was_taken_out_end_with_what_they_have(tmp_path: Path) -> None:
    app = batch_app(tmp_path, RandomHandler(3, seconds=30, trouble=0.0))
    service = app.state.service
    loops: list[asyncio.AbstractEventLoop] = []

    async def noting(scope: Any, receive: Any, send: Any) -> None:
        loops.append(asyncio.get_running_loop())
        await app(scope, receive, send)

    with served(noting) as url:
        gone, stays = client_at(url, "gone"), client_at(url, "stays")
        first = submit(gone, [line(str(number)) for number in range(50)]).id
        second = submit(stays, [line(str(number)) for number in range(50)]).id
        eventually(lambda: gone.batches.retrieve(first).status == "in_progress", "it does not begin")
        asyncio.run_coroutine_threadsafe(service.cancel_all_of(["Bearer gone"]), loops[0]).result(30)
        eventually(lambda: gone.batches.retrieve(first).status == "cancelled", "it goes on")
        batch = gone.batches.retrieve(first)
        assert batch.error_file_id is not None
        assert b"batch_cancelled" in gone.files.content(batch.error_file_id).read()
        assert stays.batches.retrieve(second).status in ("validating", "in_progress")


# -- the real server


@contextmanager
def real_server(*options: str, stderr: Any = None) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "bankfull", "serve", str(speaking_folder()), "--port", "0", *OPTIONS, *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment, process_group=0
    )
    try:
        assert process.stdout is not None
        found = re.search(r"base_url (https?://127.0.0.1:\d+)/v1", "".join(process.stdout.readline() for _ in range(5)))
        assert found is not None
        yield found[1], process
    finally:
        process.kill()
        process.wait()


def test_sighup_reads_keys_again_and_ends_neither_the_server_nor_its_engine(tmp_path: Path) -> None:
    (alice, alice_key), (bob, bob_key) = new_key("alice"), new_key("bob")
    file = tmp_path / "keys.txt"
    file.write_text(f"{alice_key.line}\n{bob_key.line}\n")
    with (
        real_server("--api-key-file", str(file)) as (url, process),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        body = {"prompt": "The river", "max_tokens": 4, "temperature": 0}
        before = client.post("/v1/completions", json=body, headers={"x-api-key": bob})
        engines = engines_of(process.pid)
        file.write_text(f"{bob_key.line}\n")
        os.killpg(process.pid, signal.SIGHUP)  # to the whole group, as a terminal sends it
        eventually(lambda: client.get("/version", headers={"x-api-key": alice}).status_code == 401, "it is not read")
        after = client.post("/v1/completions", json=body, headers={"x-api-key": bob})
        assert process.poll() is None and engines_of(process.pid) == engines
        assert before.json()["choices"] == after.json()["choices"]


def test_at_the_end_of_the_grace_everybody_is_told(tmp_path: Path) -> None:
    with (
        (tmp_path / "log").open("w") as log,
        real_server("--grace", "1", stderr=log) as (url, process),
        httpx.Client(base_url=url, timeout=60) as client,
        ThreadPoolExecutor(2) as pool,
    ):
        body = {"prompt": "The river", "max_tokens": 200, "ignore_eos": True, "n": 6}
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            pieces = response.iter_bytes()
            next(pieces)
            for engine in engines_of(process.pid):
                os.kill(engine, signal.SIGSTOP)  # it never ends by itself
            first = prompt_tokens(client)
            whole = pool.submit(client.post, "/v1/completions", json=body)
            unbegun = pool.submit(client.post, "/v1/messages", json={**CALLS["/v1/messages"], "stream": True})
            eventually(lambda: prompt_tokens(client) > 2 * first, "not all of them are there")
            process.send_signal(signal.SIGTERM)
            rest = b"".join(pieces)
        for answer in (whole.result(60), unbegun.result(60)):
            assert answer.status_code == 503 and answer.headers["content-type"] == "application/json", answer.text
            assert answer.json()["error"]["message"] == STOPPED
        process.wait(60)
    last = rest.split(b"\n\n")[-3:]
    assert STOPPED.encode() in last[0] and last[1:] == [b"data: [DONE]", b""]
    assert "Traceback" not in (tmp_path / "log").read_text()


def engines_of(process: int) -> list[int]:
    psutil = pytest.importorskip("psutil")
    children = psutil.Process(process).children(recursive=True)
    return [child.pid for child in children if "bankfull.serve.engine.worker" in child.cmdline()]


def prompt_tokens(client: httpx.Client) -> float:
    """Of all requests that the engine was asked for."""
    found = re.search(r"^bankfull:prompt_tokens_total\S* (\S+)$", client.get("/metrics").text, re.M)
    assert found is not None
    return float(found[1])
