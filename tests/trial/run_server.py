"""Runs a case on the real server: its HTTP API on a socket, its link, and its engine's worker, which is a thread here,
so that thousands of servers can be started, and so that defects can be planted in it."""

from __future__ import annotations

import asyncio
import atexit
import http.client
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Any

import pytest

import bankfull.llm
import bankfull.serve.engine.worker as worker_module
from bankfull.engine import Engine
from bankfull.fleet.routing import routing_policy
from bankfull.serve.api.texts import Texts
from bankfull.serve.app import create_app
from bankfull.serve.engine.link import Link
from bankfull.serve.engine.process import EngineConnection
from bankfull.serve.engine.worker import Worker
from bankfull.serve.replicas.local import Separation, local_separate
from bankfull.serve.replicas.replica_set import ReplicaSet
from bankfull.serve.settings import Settings
from bankfull.text.load import load_tokenizer
from bankfull.types import Output
from bankfull.weights.source import open_model
from tests.kit import poison
from tests.serve.server import Stage, served
from tests.trial import chat
from tests.trial.case import Ask
from tests.trial.outcome import Got, Outcome, Refused
from tests.trial.plain import Expected
from tests.trial.run_engine import loading, truths_of
from tests.trial.setup import Setup

PATIENCE = 30.0
EXCHANGE = 1 << 20
"""Bytes of a decoding engine's exchange."""
STEP = 0.002
"""Seconds between two arrivals that the case puts a step apart."""
UNKNOWN = ("cuts", "banned_token_ids", "tenant", "arrive", "abort", "stream", "salt", "tools")
"""Settings that the API has under another name, or not at all."""


class ThreadWorker(Worker):
    """The worker without what belongs to a process of its own."""

    def serve(self) -> None:
        while self._configured is None:
            self._inbox.wait(None)
        facts = self._load(self._configured)
        self._say(worker_module.Ready(facts))
        self._loop.run()


class ThreadEngine(EngineConnection):
    """An engine in a thread, on the other end of a socket pair."""

    progress, pid = 0, 0

    async def start(self) -> None:
        ours, self.theirs = socket.socketpair()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.error: BaseException | None = None
        self.thread.start()
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=ours)

    def _run(self) -> None:
        try:
            ThreadWorker(self.theirs).serve()
        except worker_module.ApiGone:
            pass
        except SystemExit:
            pass
        except BaseException as error:
            self.error = error
            if not isinstance(error, ValueError):
                STATE.problems.append(error)
            else:
                STATE.refused.append(str(error))
        finally:
            self.theirs.close()

    def kill(self) -> None:
        if self._transport is not None:
            self._transport.close()

    async def finish(self, patience: float) -> str:
        self.kill()
        await asyncio.to_thread(self.thread.join, patience)
        return "with its thread"


class State:
    """What happens in the worker's thread, for the thread that runs the case."""

    def __init__(self) -> None:
        self.problems: list[BaseException] = []
        self.refused: list[str] = []
        self.engines: list[Engine[Any]] = []


STATE = State()


class Front:
    """The HTTP server for one tokenizer, on which a backend after the other plays."""

    def __init__(self, folder: str) -> None:
        self.stage, self.loop = Stage(), asyncio.new_event_loop()
        tokenizer, template = load_tokenizer(open_model(folder))
        texts = Texts(tokenizer, template, {})
        app = create_app(self.stage, texts, Settings(names=("trial",)), lifespan=self._lifespan)  # type: ignore[arg-type]
        running = served(app)
        atexit.register(running.__exit__, None, None, None)
        self.port = int(running.__enter__().rpartition(":")[2])

    @asynccontextmanager
    async def _lifespan(self, app: Any) -> AsyncIterator[None]:
        self.loop = asyncio.get_running_loop()
        yield

    def wait(self, what: Any, seconds: float = PATIENCE) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self.loop).result(seconds)


@lru_cache
def front_of(vocab: int, folder: str) -> Front:
    return Front(folder)


_folders: dict[tuple[int, str], str] = {}
"""The first model of each vocabulary, in each kind of files: the others have the same tokenizer."""


def run(setup: Setup, expected: Sequence[Sequence[Expected]]) -> list[Outcome]:
    folder = _folders.setdefault((setup.model.vocab, setup.model.folder.suffix), str(setup.model.folder))
    front = front_of(setup.model.vocab, folder)
    STATE.__init__()  # type: ignore[misc]
    with pytest.MonkeyPatch.context() as patch, loading(setup, truths_of(setup, expected)) as load:
        _inside_a_thread(patch, load)
        link = front.wait(_linked(setup))
        front.stage.current = link
        try:
            front.wait(link.start())
            _until_ready(link, setup)
            with ThreadPoolExecutor(len(setup.case.asks)) as pool:
                outcomes = list(pool.map(lambda ask: _ask(front.port, ask), setup.case.asks))
            _settle()
        finally:
            front.wait(link.close())
    if STATE.problems:
        raise STATE.problems[0]
    return outcomes


async def _linked(setup: Setup) -> Link | ReplicaSet:
    def link(open_engine: Any = ThreadEngine, threads: int | None = 1, **more: Any) -> Link:
        """Whatever starts engines elsewhere: these are threads."""
        many = {"tells_prefixes": True} if setup.service else {}
        how = {"threads": 1, "open_engine": ThreadEngine, "stall_seconds": 0.0, **many, **more}
        return Link(str(setup.model.folder), {}, **how)

    if setup.service == "replicas":
        return ReplicaSet({"a": link(), "b": link()}, routing_policy("least-loaded"))
    if setup.service == "separate":
        return local_separate(Separation(1, 1, EXCHANGE, "socket"), "least-loaded")(link)
    return link()


def _inside_a_thread(patch: pytest.MonkeyPatch, load: Any) -> None:
    step = Engine.step

    def poisoned(engine: Engine[Any]) -> list[Output]:
        outputs = step(engine)
        engine.scheduler.state.check()
        poison(engine)
        return outputs

    def loads(*_: Any, **__: Any) -> Any:
        with one_at_a_time:
            made = load()
        STATE.engines.append(made.engine)
        return made

    one_at_a_time = threading.Lock()

    def leave(status: int) -> None:
        raise SystemExit(status)

    patch.setattr(bankfull.llm, "load", loads)
    patch.setattr(Engine, "step", poisoned)
    patch.setattr(worker_module, "_leave", leave)


def _until_ready(link: Link | ReplicaSet, setup: Setup) -> None:
    ends, engines = time.monotonic() + PATIENCE, 2 if setup.service else 1
    first = getattr(link, "prefill", link)  # of a pair, the engine where requests begin
    while not (link.ready and first.ready and len(STATE.engines) >= engines):
        if STATE.refused:
            raise Refused(STATE.refused[0])
        if STATE.problems:
            raise STATE.problems[0]
        if time.monotonic() > ends:
            raise TimeoutError("the engine was not ready in time")
        time.sleep(0.002)


def _settle() -> None:
    """When all answers are here and the engine is idle, nothing is left behind."""
    ends = time.monotonic() + PATIENCE
    for engine in STATE.engines:
        while (left := _left(engine)) and time.monotonic() < ends:  # its thread may be about to settle a step
            time.sleep(0.002)
        assert not left, f"left behind: {left}"


def _left(engine: Engine[Any]) -> str:
    pages, slots = engine.scheduler.state.census()
    held = pages.held + pages.quarantined + slots.held + slots.quarantined
    return f"{pages} {slots}" if held or engine.busy else ""


def _body(ask: Ask) -> dict[str, Any]:
    body = {name: value for name, value in ask.settings.items() if name not in UNKNOWN}
    for name in ask.get("tools", {}).get("set_by_server", ()):
        del body[name]
    if "structured" in body:
        body["structured_outputs"] = body.pop("structured")
    if "salt" in ask.settings:
        body["cache_salt"] = ask.get("salt")
    if ask.get("stream"):
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    said = chat.body(ask) if "tools" in ask.settings else {"prompt": list(ask.prompt)}
    return {"temperature": 0.0, "top_p": 1.0, **body, **said, "model": "trial"}


def _ask(port: int, ask: Ask) -> Outcome:
    time.sleep(STEP * ask.get("arrive", 0))
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    outcome = Outcome()
    try:
        path = "/v1/chat/completions" if "tools" in ask.settings else "/v1/completions"
        connection.request("POST", path, json.dumps(_body(ask)), {"content-type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            return _refusal(outcome, json.loads(reply.read())["error"], reply.status)
        if not ask.get("stream"):
            _read_whole(outcome, json.loads(reply.read()))
        else:
            _read_stream(outcome, ask, reply)
    finally:
        connection.close()
    return outcome


def _refusal(outcome: Outcome, error: dict[str, Any], status: int) -> Outcome:
    if error.get("code") == "generation_failed":
        outcome.failed = error["message"]
    elif status < 500:
        outcome.refused = error["message"]
    else:
        raise AssertionError(f"HTTP {status}: {error}")
    return outcome


def _read_whole(outcome: Outcome, answer: dict[str, Any]) -> None:
    for choice in sorted(answer["choices"], key=lambda one: one["index"]):
        got = Got(None, "", choice["finish_reason"], choice.get("stop_reason"))
        _take_said(got, choice, choice.get("message", {}))
        outcome.samples.append(got)
    _take_usage(outcome, answer["usage"])


def _read_stream(outcome: Outcome, ask: Ask, reply: http.client.HTTPResponse) -> None:
    outcome.samples = [Got(None, "", None) for _ in range(ask.get("n", 1))]
    pieces, most = 0, ask.get("abort")
    while line := reply.readline():
        if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
            continue
        chunk = json.loads(line[6:])
        if "error" in chunk:
            outcome.failed = chunk["error"]["message"]
            return
        if chunk.get("usage"):
            _take_usage(outcome, chunk["usage"])
        for choice in chunk["choices"]:
            got = outcome.samples[choice["index"]]
            _take_said(got, choice, choice.get("delta", {}))
            if choice["finish_reason"]:
                got.finish, got.stop_reason = choice["finish_reason"], choice.get("stop_reason")
        pieces += 1
        if most is not None and pieces > most:
            for got in outcome.samples:
                got.finish = got.finish or "abort"
            return


def _take_said(got: Got, choice: dict[str, Any], message: dict[str, Any]) -> None:
    """A choice of a completion, or that of a chat with its message, or a part of one."""
    got.text += choice.get("text") or message.get("content") or ""
    for number, call in enumerate(message.get("tool_calls") or ()):
        function, place = call["function"], call.get("index")
        place = number if place is None else place
        if function.get("name"):
            assert place == len(got.calls), f"call {call} comes after {got.calls}"
            got.calls.append([function["name"], ""])
        got.calls[place][1] += function.get("arguments") or ""
    if lines := choice.get("logprobs"):
        values = [one["logprob"] for one in lines["content"]] if "content" in lines else lines["token_logprobs"]
        got.values = (got.values or []) + values


def _take_usage(outcome: Outcome, usage: dict[str, Any]) -> None:
    outcome.prompt_tokens, outcome.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    outcome.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
