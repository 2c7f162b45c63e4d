"""The state document of the console: counters, time lines with their limits, and no requests of other keys."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest

from bankfull.fleet.page_tables import SequencePages
from bankfull.outputs import Delta
from bankfull.sample.params import SamplingParams
from bankfull.sched.policy import BATCH_PRIORITY
from bankfull.serve.app import create_app
from bankfull.serve.console.state import SHOWN_RUNNING, ConsoleState, console_routes
from bankfull.serve.console.timelines import (
    KEPT_BATCH_LINES,
    KEPT_REQUESTS,
    OpenLine,
    TimeLine,
    TimeLines,
    least_seconds,
)
from bankfull.serve.engine.backend import EngineDied
from bankfull.serve.engine.wire import Facts, Load, RequestDone
from bankfull.serve.guard.checks import access_policy
from bankfull.serve.guard.keys import Keyring, new_key
from bankfull.serve.guard.layers import protect
from bankfull.serve.telemetry.metrics import ServiceMetrics
from bankfull.serve.telemetry.trace import Trace, during
from bankfull.serve.telemetry.watch import WatchedBackend
from bankfull.submit import Submit
from tests.serve.scripted import Scripted, scripted_texts, settings
from tests.serve.server import served
from tests.work import work_of

CEILINGS = {"read_bytes_per_s": 100.0, "flops": 1000.0}
PARAMS = SamplingParams()
ALICE, ALICE_KEY = new_key("alice", requests=2)
BOB, BOB_KEY = new_key("bob")
ROOT, ROOT_KEY = new_key("root", admin=True)


def load(steps: int, decode_bytes: float = 0.0, prompt_flops: float = 0.0) -> Load:
    return Load(1, 0, 0, 0, 10, 0, 0, 0, steps, 0.0, decode_bytes, prompt_flops, 0.0, decode_bytes, 0.0)


class Steps:
    """A backend whose steps, counters and times the test sets."""

    ready = True
    says = ""
    restarts = failed_loads = 0

    def __init__(self) -> None:
        self.facts: Facts | None = Facts("/secret/path", 64, 97, 4, 10, 16, 64, "float32", "cpu", CEILINGS)
        self.load: Load | None = None
        self.now = 100.0
        self._items: asyncio.Queue[list[Delta | RequestDone] | Exception] = asyncio.Queue()

    def step(self, seconds: float, items: list[Delta | RequestDone] | Exception, load: Load) -> None:
        self.now += seconds
        self.load = load
        self._items.put_nowait(items)

    async def generate(self, submit: Submit) -> AsyncIterator[list[Delta | RequestDone]]:
        while True:
            item = await self._items.get()
            if isinstance(item, Exception):
                raise item
            yield item

    def expect(self, samples: int, priority: int = 0) -> None:
        pass

    async def reset_cache(self) -> int:
        return 0


def piece(count: int = 1, finish: str | None = None) -> Delta:
    return Delta(1, 0, "x", [5] * count, None, finish)


def watched(steps: Any) -> WatchedBackend:
    backend = WatchedBackend(steps, ServiceMetrics(), Keyring())
    backend.lines = TimeLines(steps, clock=lambda: steps.now)
    return backend


def only(backend: WatchedBackend) -> TimeLine:
    state = ConsoleState(backend, ServiceMetrics(), backend.lines, settings()).after(0)
    assert len(state.requests) == 1
    return state.requests[0]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    made = Steps()
    monkeypatch.setattr("bankfull.serve.telemetry.watch.time.monotonic", lambda: made.now)
    return made


def test_a_time_line_covers_a_request_from_arrival_to_end_with_its_limits(steps: Steps) -> None:
    async def follow() -> None:
        backend = watched(steps)
        with during(Trace("req-1", "POST", "/v1/completions", steps.now - 0.5)):
            answer = backend.generate(Submit([1, 2, 3], PARAMS))
        assert (only(backend).outcome, only(backend).prepare, only(backend).first_token) == ("waiting", 0.5, None)
        steps.step(2.0, [piece()], load(1, prompt_flops=1500.0))
        await answer.__anext__()
        shown = only(backend)
        assert (shown.outcome, shown.first_token, shown.first_token_limit) == ("running", 2.5, 1.5)
        assert (shown.wait, shown.queue, shown.prompt, shown.decode) == (2.0, None, None, 0.0)
        for number in range(4):
            steps.step(1.0, [piece()], load(2 + number, 50.0 * (number + 1), 1500.0))
            await answer.__anext__()
        assert (only(backend).tokens_per_s, only(backend).tokens_per_s_limit) == (1.0, 2.0)
        steps.step(1.0, [piece(finish="length"), RequestDone(1, 0.25, 2.0, 7.0, 2, 6)], load(6, 250.0, 1500.0))
        await answer.__anext__()
        line = only(backend)
        assert line.number == 1 and line.outcome == "length" and line.route == "/v1/completions" and line.id == "req-1"
        parts = (line.prepare, line.wait, line.queue, line.prompt, line.decode)
        assert parts == (0.5, None, 0.25, 1.75, 5.0) and line.seconds == 7.5
        assert (line.prompt_tokens, line.cached_tokens, line.output_tokens) == (3, 2, 6)
        assert (line.first_token, line.first_token_limit) == (2.5, 1.5)
        assert (line.tokens_per_s, line.tokens_per_s_limit) == (1.0, 2.0)

    asyncio.run(follow())


def test_without_a_compute_ceiling_bandwidth_is_the_limit() -> None:
    before, after = load(1), load(2, 50.0, 1500.0)
    known = {"read_bytes_per_s": 100.0}
    assert least_seconds(before, after, known) == least_seconds(before, after, {**known, "flops": 1e30})


def test_without_ceilings_there_are_times_but_no_limits(steps: Steps) -> None:
    steps.facts = msgspec.structs.replace(steps.facts, ceilings=None)

    async def follow() -> None:
        backend = watched(steps)
        with during(Trace("req-1", "POST", "/", steps.now)):
            answer = backend.generate(Submit([1], PARAMS))
        steps.step(1.0, [piece()], load(1))
        await answer.__anext__()
        steps.step(1.0, [piece(finish="stop"), RequestDone(1, 0.0, 1.0, 2.0, 0, 2)], load(2, 50.0))
        await answer.__anext__()
        line = only(backend)
        assert (line.first_token, line.tokens_per_s) == (1.0, 1.0)
        assert line.first_token_limit is None and line.tokens_per_s_limit is None

    asyncio.run(follow())


def test_the_limit_sums_both_kinds_of_steps_and_is_unknown_after_a_restart() -> None:
    before, after = load(10, decode_bytes=100.0), load(12, decode_bytes=300.0, prompt_flops=500.0)
    assert least_seconds(before, after, CEILINGS) == 200 / 100 + 500 / 1000
    assert least_seconds(after, load(3), CEILINGS) is None
    assert least_seconds(before, None, CEILINGS) is None


def test_disconnects_and_engine_crashes_are_reported_as_such() -> None:
    async def leave(error: Exception | None) -> str:
        steps = Steps()
        backend = watched(steps)
        with during(Trace("req-1", "POST", "/", steps.now)):
            answer = backend.generate(Submit([1], PARAMS))
        steps.step(1.0, [piece()], load(1))
        await answer.__anext__()
        if error is None:
            await answer.aclose()  # type: ignore[attr-defined]
        else:
            steps.step(1.0, error, load(2))
            with pytest.raises(EngineDied):
                await answer.__anext__()
        return only(backend).outcome

    assert asyncio.run(leave(None)) == "left"
    assert asyncio.run(leave(EngineDied("dead"))) == "EngineDied"


def test_a_dropped_request_disappears() -> None:
    async def drop() -> None:
        backend = watched(Steps())
        with during(Trace("req-1", "POST", "/", 0.0)):
            answer = backend.generate(Submit([1], PARAMS))
        assert len(backend.lines.running()) == 1
        del answer
        gc.collect()
        assert backend.lines.running() == []

    asyncio.run(drop())


def test_the_document_is_bounded_and_contains_only_new_requests() -> None:
    steps = Steps()
    backend = watched(steps)
    lines = backend.lines
    endpoint = ConsoleState(backend, ServiceMetrics(), lines, settings())
    opened = [lines.open(Trace("x" * 500, "POST", "/" * 500, 0.0), 1) for _ in range(3 * KEPT_REQUESTS)]
    batch = [lines.open(Trace("", "POST", "/v1/completions", 0.0), 1, batch=True) for _ in range(3 * KEPT_REQUESTS)]
    assert len(endpoint.after(0).requests) == SHOWN_RUNNING
    for line in [*opened, *batch]:
        line.end(RequestDone(1, 0.0, None, 1.0, 0, 0))
    state = endpoint.after(0)
    assert len(state.requests) == KEPT_REQUESTS + KEPT_BATCH_LINES
    assert sum(line.batch for line in state.requests) == KEPT_BATCH_LINES
    encoded = msgspec.json.encode(state)
    assert len(encoded) < 250_000 and b"/secret/path" not in encoded
    assert endpoint.after(state.last).requests == [] and endpoint.after(state.last).last == state.last
    empty = ConsoleState(backend, ServiceMetrics(), TimeLines(backend), settings())
    again, nothing = work_of(lambda: endpoint.after(state.last)), work_of(lambda: empty.after(0))
    assert again < nothing + 50, "requests that were sent once are not sent again"


@pytest.fixture(scope="module")
def url() -> Any:
    keyring, metrics, chosen = Keyring((ALICE_KEY, BOB_KEY, ROOT_KEY)), ServiceMetrics(), settings()
    backend = WatchedBackend(Scripted(["Hello", " world"]), metrics, keyring)
    app = create_app(backend, scripted_texts(), chosen)
    app.router.routes.extend(console_routes(backend, metrics, backend.lines, chosen))
    with served(protect(app, backend, access_policy(keyring, host="127.0.0.1"), metrics)) as address:
        yield address


def get_state(url: str, key: str, **parameters: object) -> httpx.Response:
    return httpx.get(url + "/console/state", params=parameters, headers={"x-api-key": key})  # type: ignore[arg-type]


def test_a_key_sees_its_own_requests_and_an_admin_sees_all(url: str) -> None:
    for key, name in ((ALICE, "from-alice"), (BOB, "from-bob")):
        body = {"model": "tiny", "prompt": "x", "stream": name == "from-bob"}
        headers = {"x-api-key": key, "x-request-id": name}
        assert httpx.post(url + "/v1/completions", json=body, headers=headers).status_code == 200

    def seen(key: str) -> set[tuple[str, str]]:
        return {(line["id"], line["key"]) for line in get_state(url, key).json()["requests"]}

    assert seen(ALICE) == {("from-alice", "alice")} and seen(BOB) == {("from-bob", "bob")}
    assert seen(ROOT) == {("from-alice", "alice"), ("from-bob", "bob")}


def test_polling_is_not_charged_to_the_rate_limit(url: str) -> None:
    for _ in range(5):
        assert get_state(url, ALICE).status_code == 200
    state = get_state(url, ALICE).json()
    assert state["ready"] is True and state["model"] == "tiny" and "name" not in state["facts"]
    assert get_state(url, ALICE).headers["cache-control"] == "no-store"


@pytest.mark.parametrize("after", ["-1", "x", "1.5", "9" * 40, "١"])
def test_an_invalid_query_is_refused_in_a_sentence(url: str, after: str) -> None:
    answer = get_state(url, BOB, after=after)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "after"


def test_lines_of_batches_are_marked() -> None:
    async def follow() -> None:
        steps = Steps()
        backend = watched(steps)
        with during(Trace("", "POST", "/v1/completions", steps.now)):
            answer = backend.generate(Submit([1], PARAMS, priority=BATCH_PRIORITY))
        assert only(backend).batch
        del answer

    asyncio.run(follow())


@pytest.mark.parametrize("ends_well", [True, False])
def test_tokens_are_summed_without_a_call_per_token(monkeypatch: pytest.MonkeyPatch, ends_well: bool) -> None:
    """The line is updated at the first tokens and at the end; the trace gets the sum in every case."""
    calls: list[str] = []
    for name in ("begin", "end", "fail"):
        original = getattr(OpenLine, name)

        def spy(line: OpenLine, *given: Any, name: str = name, original: Any = original) -> None:
            calls.append(name)
            original(line, *given)

        monkeypatch.setattr(OpenLine, name, spy)

    async def use() -> TimeLine:
        backend, trace = Steps(), Trace("id", "POST", "/x", 100.0)
        watched = WatchedBackend(backend, ServiceMetrics(), Keyring())  # type: ignore[arg-type]
        for number in range(50):
            backend.step(0.1, [Delta(1, 0, "ab", [5, 6])], load(number + 1))
        backend.step(
            0.1, [Delta(1, 0, "c", [7], finish_reason="stop"), RequestDone(1, 0.0, 0.1, 5.1, 0, 101)], load(51)
        )
        with during(trace):
            steps = watched.generate(Submit([1, 2, 3], PARAMS))
        for _ in range(51 if ends_well else 50):
            await anext(steps)
        await steps.aclose()  # type: ignore[attr-defined]
        (line,) = watched.lines.ended_after(0)
        assert trace.completion_tokens == line.output_tokens
        return line

    line = asyncio.run(use())
    assert calls == (["begin", "end"] if ends_well else ["begin", "fail"])
    assert (line.output_tokens, line.outcome) == ((101, "stop") if ends_well else (100, "left"))


def test_a_key_sees_the_page_tables_of_its_own_sequences_only() -> None:
    sequences = [SequencePages("1", 0, "alice", 20, [[3, 4]]), SequencePages("2", 0, "bob", 40, [[3, 5, 6]])]
    scripted, metrics = Scripted(sequences=sequences), ServiceMetrics()
    keyring = Keyring((ALICE_KEY, BOB_KEY, ROOT_KEY))
    backend = WatchedBackend(scripted, metrics, keyring)
    app = create_app(backend, scripted_texts(), settings())
    app.router.routes.extend(console_routes(backend, metrics, backend.lines, settings()))
    with served(protect(app, backend, access_policy(keyring, host="127.0.0.1"), metrics)) as url:

        def shown(secret: str) -> dict[str, Any]:
            found: dict[str, Any] = httpx.get(f"{url}/console/page_tables", headers={"x-api-key": secret}).json()[""]
            return found

        assert [one["tables"] for one in shown(BOB)["sequences"]] == [[[3, 5, 6]]]
        assert [one["key"] for one in shown(ROOT)["sequences"]] == ["alice", "bob"]
        assert shown(ROOT)["references"] == {"3": 2} and shown(ROOT)["running"] == 2
        for _ in range(5):  # it costs none of the key's two requests per minute
            assert len(shown(ALICE)["sequences"]) == 1
        assert httpx.get(f"{url}/console/page_tables").status_code == 401
