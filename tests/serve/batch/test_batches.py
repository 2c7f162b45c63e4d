"""/v1/batches: every line gets exactly one result, whatever happens in the meantime."""

from __future__ import annotations

import json
import logging
import random
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from bankfull.sched.policy import BATCH_PRIORITY
from bankfull.serve.api.calls import CALLER, Caller
from bankfull.serve.app import create_app
from bankfull.serve.batch.input import Validation
from bankfull.serve.batch.service import BatchService, handle_within
from bankfull.serve.data.batch_store import BatchStore
from bankfull.serve.data.store import Store
from bankfull.serve.engine.backend import Backend
from bankfull.serve.guard.checks import access_policy
from bankfull.serve.guard.keys import Keyring, keys_of_environment, new_key
from bankfull.serve.guard.layers import protect
from bankfull.serve.supervise import Supervisor
from bankfull.serve.telemetry.exposition import Histogram
from bankfull.serve.telemetry.metrics import ServiceMetrics
from bankfull.serve.telemetry.watch import WatchedBackend
from tests.serve.batch_app import RandomHandler, batch_app
from tests.serve.scripted import Scripted, scripted_texts, settings
from tests.serve.server import served

ROOT = Path(__file__).parents[3]
ENDED = ("completed", "failed", "expired", "cancelled")


def whole_app(folder: Path, backend: Backend, keyring: Keyring | None = None, **options: Any) -> Any:
    """The application, with the caller that authentication would have set."""
    app = create_app(backend, scripted_texts(), settings())
    caller = Caller(key="me", salt="salt of me")
    handle = handle_within(app.state.apis, lambda key: caller, keyring)
    service = BatchService(folder, handle, rows=lambda: 4, **options)
    app.router.routes.extend(service.routes)

    async def with_key(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            async with service:
                await app(scope, receive, send)
        else:
            await app({**scope, CALLER: caller}, receive, send)

    return with_key


def guarded_app(folder: Path, keys: str) -> Any:
    """The application with keys from the environment, as `bankfull serve` reads them."""
    access = access_policy(Keyring(keys_of_environment({"BANKFULL_API_KEY": keys})), host="127.0.0.1")
    service = BatchService(folder, RandomHandler(0), rows=lambda: 4)

    @asynccontextmanager
    async def life(app: Any) -> AsyncIterator[None]:
        async with service:
            yield

    app = create_app(Scripted(), scripted_texts(), settings(), lifespan=life)
    app.router.routes.extend(service.routes)
    return protect(app, Scripted(), access, ServiceMetrics())


def line(custom_id: str, question: str = "why?", **changes: Any) -> str:
    fields = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"question": question}}
    return json.dumps({**fields, **changes})


def client_at(url: str, key: str = "one") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


@contextmanager
def client_of(folder: Path, handle: Any = None, **options: Any) -> Iterator[openai.OpenAI]:
    with served(batch_app(folder, handle or RandomHandler(0), **options)) as url:
        yield client_at(url)


def submit(client: openai.OpenAI, lines: list[str], **options: Any) -> Any:
    file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    given: dict[str, Any] = {"endpoint": "/v1/completions", "completion_window": "24h", **options}
    return client.batches.create(input_file_id=file.id, **given)


def ended(client: openai.OpenAI, id: str, seconds: float = 30) -> Any:
    until = time.monotonic() + seconds
    while (batch := client.batches.retrieve(id)).status not in ENDED:
        assert time.monotonic() < until, batch
        time.sleep(0.02)
    return batch


def results(client: openai.OpenAI, file_id: str | None) -> list[Any]:
    return [] if file_id is None else [json.loads(each) for each in client.files.content(file_id).text.splitlines()]


def test_every_line_has_one_result_in_the_order_of_the_input(tmp_path: Path) -> None:
    handler = RandomHandler(1)
    with client_of(tmp_path, handler) as client:
        questions = ["bad" if number % 10 == 3 else f"q{number}" for number in range(100)]
        created = submit(client, [line(f"id-{n}", q) for n, q in enumerate(questions)], metadata={"who": "me"})
        assert created.status == "validating" and created.metadata == {"who": "me"}
        batch = ended(client, created.id)
        assert batch.status == "completed"
        assert batch.request_counts.model_dump() == {"total": 100, "completed": 90, "failed": 10}
        good, bad = results(client, batch.output_file_id), results(client, batch.error_file_id)
        assert [each["custom_id"] for each in good] == [f"id-{n}" for n, q in enumerate(questions) if q != "bad"]
        for each in good:
            body = each["response"]["body"]
            assert each["response"]["status_code"] == 200 and each["error"] is None
            assert body == {"answer": f"q{each['custom_id'][3:]}", "priority": BATCH_PRIORITY}
        assert {each["response"]["status_code"] for each in bad} == {400}
        assert bad[0]["response"]["body"]["error"]["param"] == "question"
        assert client.files.retrieve(batch.output_file_id).purpose == "batch_output"
        assert 4 < handler.most <= 12  # the rows and a small backlog


def test_problems_of_the_input_are_reported_by_line(tmp_path: Path) -> None:
    lines = [
        line("a"),
        "{nonsense",
        line("a"),
        line("b", url="/v1/embeddings"),
        line("c", method="GET"),
        "",
        line("d", more=1),
        line("e", body=[1]),
        line("f", body={"stream": True}),
        line("g" * 600),
        line("h", body="X").replace('"X"', '{"a":' + "[" * 50_000),
    ]
    with client_of(tmp_path) as client:
        batch = ended(client, submit(client, lines).id)
        assert batch.status == "failed" and batch.output_file_id is None
        found = {(problem.line, problem.code) for problem in batch.errors.data}
        assert found == {
            (2, "invalid_json_line"),
            (3, "duplicate_custom_id"),
            (4, "mismatched_url"),
            (5, "invalid_request"),
            (7, "invalid_request"),
            (8, "invalid_body"),
            (9, "invalid_body"),
            (10, "invalid_request"),
            (11, "invalid_json_line"),
        }


def test_a_line_has_the_limits_of_a_body(tmp_path: Path) -> None:
    def problems(*bodies: Any) -> list[tuple[int | None, str]]:
        path = tmp_path / "input.jsonl"
        path.write_text("".join(line(f"{number}", body=body) + "\n" for number, body in enumerate(bodies)))
        validation = Validation(path, "/v1/completions", most_body_bytes=1 << 20)
        good = [each.line for group in validation.groups() for each in group]
        assert len(good) + len(validation.problems) == len(bodies)
        return [(problem.line, problem.code) for problem in validation.problems]

    assert problems({"a": "x" * (1 << 20)}, {"a": "x" * 1000}) == [(1, "body_too_large")]
    assert problems({"a": 1}, {"a": "x" * (2 << 20)}, {"a": 2}) == [(2, "line_too_long")]
    assert problems({"a": [[]] * 70_000}, {"a": "[" * 70_000}) == [(1, "too_many_values")]


def test_too_many_lines_and_none_at_all_fail(tmp_path: Path) -> None:
    with client_of(tmp_path, most_lines=5) as client:
        many = ended(client, submit(client, [line(str(n)) for n in range(6)]).id)
        assert [problem.code for problem in many.errors.data] == ["too_many_requests"]
        assert ended(client, submit(client, [" ", ""]).id).errors.data[0].code == "empty_file"
        assert ended(client, submit(client, [line(str(n)) for n in range(5)]).id).status == "completed"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "1y"}, "completion_window"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"metadata": {str(n): "v" for n in range(17)}}, "metadata"),
        ({"extra_body": {"surprise": 1}}, "surprise"),
    ],
)
def test_an_invalid_batch_is_refused_with_the_name_of_the_field(tmp_path: Path, change: Any, named: str) -> None:
    with client_of(tmp_path) as client, pytest.raises(openai.BadRequestError) as refused:
        submit(client, [line("a")], **change)
    assert named in refused.value.message


def test_a_cancelled_batch_keeps_its_results(tmp_path: Path) -> None:
    with client_of(tmp_path, RandomHandler(2, seconds=0.1)) as client:
        id = submit(client, [line(str(n)) for n in range(400)]).id
        while client.batches.retrieve(id).request_counts.completed < 3:
            time.sleep(0.02)
        client.batches.cancel(id)
        batch = ended(client, id)
        assert batch.status == "cancelled"
        good, bad = results(client, batch.output_file_id), results(client, batch.error_file_id)
        assert 3 <= len(good) == batch.request_counts.completed and len(good) + len(bad) == 400
        assert {each["error"]["code"] for each in bad} == {"batch_cancelled"}
        assert client.batches.cancel(id).status == "cancelled"


def test_a_batch_that_takes_too_long_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Long enough for a busy machine to finish some lines, and too short for all.
    monkeypatch.setattr("bankfull.serve.batch.batches.window_seconds", lambda text: 3)
    with client_of(tmp_path, RandomHandler(3, seconds=0.5)) as client:
        batch = ended(client, submit(client, [line(str(n)) for n in range(1500)]).id)
        assert batch.status == "expired" and batch.expired_at >= batch.expires_at
        good, bad = results(client, batch.output_file_id), results(client, batch.error_file_id)
        assert good and len(good) + len(bad) == 1500 == batch.request_counts.total
        assert {each["error"]["code"] for each in bad} == {"batch_expired"}


def test_a_line_that_kills_the_engine_fails_alone(tmp_path: Path) -> None:
    with client_of(tmp_path, RandomHandler(4, trouble=0.0)) as client:
        lines = [line(str(n), "deadly" if n == 5 else "fine") for n in range(30)]
        batch = ended(client, submit(client, lines).id)
        assert (batch.request_counts.completed, batch.request_counts.failed) == (29, 1)
        bad = results(client, batch.error_file_id)
        assert bad[0]["custom_id"] == "5" and bad[0]["response"]["body"]["error"]["code"] == "engine_died"


def test_a_small_batch_does_not_wait_for_a_large_one(tmp_path: Path) -> None:
    with client_of(tmp_path, RandomHandler(5, seconds=0.05, trouble=0.0)) as client:
        large = submit(client, [line(str(n)) for n in range(2000)]).id
        while client.batches.retrieve(large).request_counts.completed < 1:
            time.sleep(0.02)
        small = submit(client, [line(str(n)) for n in range(20)]).id
        ended(client, small)
        assert client.batches.retrieve(large).request_counts.completed < 1000
        client.batches.cancel(large)


def test_one_key_never_sees_the_batches_of_another(tmp_path: Path) -> None:
    with served(batch_app(tmp_path, RandomHandler(6))) as url:
        mine, other = client_at(url, "mine"), client_at(url, "other")
        batch = submit(mine, [line("a")])
        with pytest.raises(openai.NotFoundError):
            other.batches.retrieve(batch.id)
        with pytest.raises(openai.NotFoundError):
            other.batches.cancel(batch.id)
        with pytest.raises(openai.NotFoundError):
            other.batches.create(input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h")
        assert list(other.batches.list()) == [] and [each.id for each in mine.batches.list()] == [batch.id]


def test_batches_are_listed_page_by_page(tmp_path: Path) -> None:
    with client_of(tmp_path) as client:
        ids = [submit(client, [line("a")]).id for _ in range(7)]
        assert [each.id for each in client.batches.list(limit=3)] == ids[::-1]


def test_in_the_application_lines_run_as_their_owner_at_the_lowest_priority(tmp_path: Path) -> None:
    backend = Scripted()
    with served(whole_app(tmp_path, backend)) as url:
        client = client_at(url)
        messages = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
        chat = "/v1/chat/completions"
        lines = [line("a", url=chat, body=messages), line("b", url=chat, body={**messages, "surprise": 1})]
        batch = ended(client, submit(client, lines, endpoint=chat).id)
        good, bad = results(client, batch.output_file_id), results(client, batch.error_file_id)
        assert good[0]["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
        assert bad[0]["response"]["status_code"] == 400 and "surprise" in str(bad[0]["response"]["body"])
        assert [(asked.priority, asked.salt) for asked in backend.asked] == [(BATCH_PRIORITY, "10:salt of me")]


def test_after_a_restart_only_lines_without_a_result_run(tmp_path: Path) -> None:
    questions = [f"q{n}" for n in range(200)]
    with client_of(tmp_path, RandomHandler(7, seconds=0.1, trouble=0.0)) as client:
        id = submit(client, [line(q, q) for q in questions]).id
        while client.batches.retrieve(id).request_counts.completed < 30:
            time.sleep(0.02)
    store = Store(tmp_path)
    have = {name for (name,) in store.query("SELECT custom_id FROM lines WHERE status IS NOT NULL")}
    store.close()
    handler = RandomHandler(8, trouble=0.0)
    with client_of(tmp_path, handler) as client:
        batch = ended(client, id)
        assert batch.request_counts.completed == 200 and 30 <= len(have) < 200
        assert sorted(asked for _, asked in handler.calls) == sorted(set(questions) - have)
        assert len(results(client, batch.output_file_id)) == 200


class Process:
    """The service in a process that can be killed at any time."""

    def __init__(self, folder: Path, seconds: float) -> None:
        command = [sys.executable, "-m", "tests.serve.batch_app", str(folder), str(seconds)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.client = client_at(self._process.stdout.readline().strip())

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def crash_loop(folder: Path, lines: int, kills: int, seed: int, seconds: float) -> None:
    chance, expected = random.Random(seed), {f"id-{n}": f"q{n}" for n in range(lines)}
    process = Process(folder, seconds)
    try:
        id = submit(process.client, [line(*each) for each in expected.items()]).id
        for _ in range(kills):
            time.sleep(chance.random() * 0.3)
            assert process.client.batches.retrieve(id).status not in ENDED, "the batch ended before all kills"
            time.sleep(chance.random() * 0.01)
            process.kill()
            process = Process(folder, seconds)
        batch = ended(process.client, id, seconds=300)
        assert batch.status == "completed" and batch.request_counts.completed == lines
        found = results(process.client, batch.output_file_id)
        assert len(found) == lines and batch.error_file_id is None
        assert {each["custom_id"]: each["response"]["body"]["answer"] for each in found} == expected
    finally:
        process.kill()


def test_a_batch_has_one_result_per_line_after_repeated_kills(tmp_path: Path) -> None:
    crash_loop(tmp_path, lines=150, kills=4, seed=1, seconds=0.3)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_hundred_kills_in_ten_thousand_lines(tmp_path: Path) -> None:
    crash_loop(tmp_path, lines=10_000, kills=100, seed=2, seconds=0.06)


def test_the_openapi_document_has_files_and_batches_where_they_are_served(tmp_path: Path) -> None:
    described = {
        "/v1/files": {"get", "post"},
        "/v1/files/{id}": {"get", "delete"},
        "/v1/files/{id}/content": {"get"},
        "/v1/batches": {"get", "post"},
        "/v1/batches/{id}": {"get"},
        "/v1/batches/{id}/cancel": {"post"},
    }
    with served(create_app(Scripted(), scripted_texts(), settings())) as url:
        assert not described.keys() & httpx.get(f"{url}/openapi.json").json()["paths"].keys()
    with served(whole_app(tmp_path, Scripted())) as url:
        document = httpx.get(f"{url}/openapi.json").json()
        paths = document["paths"]
        assert {path: set(paths[path]) for path in described} == described
        for path, methods in described.items():
            for method in methods:
                assert httpx.request(method, url + path).status_code != 405, (method, path)
    body = paths["/v1/batches"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schema = document["components"]["schemas"][body["$ref"].rpartition("/")[2]]
    assert set(schema["required"]) == {"input_file_id", "endpoint", "completion_window"}
    assert [each["name"] for each in paths["/v1/files"]["get"]["parameters"]] == ["after", "limit", "order", "purpose"]


@pytest.mark.parametrize(
    ("endpoint", "body", "input", "output"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, None, 4),
        ("/v1/responses", {"input": "x"}, None, 4),
        ("/v1/completions", {"prompt": "xyz"}, 3, 4),
        ("/v1/embeddings", {"input": ["ab", "c"]}, 3, 0),
    ],
)
def test_usage_adds_up_for_every_endpoint(
    tmp_path: Path, endpoint: str, body: dict[str, Any], input: int | None, output: int
) -> None:
    backend = Scripted(["ab", "cd"], cached=2)
    with served(whole_app(tmp_path, backend)) as url, client_at(url) as client:
        lines = [line(f"{number}", url=endpoint, body={"model": "tiny", **body}) for number in range(5)]
        lines.append(line("bad", url=endpoint, body={"nonsense": 1}))
        batch = ended(client, submit(client, lines, endpoint=endpoint).id)
        counts, usage = batch.request_counts, batch.usage
        assert (counts.completed, counts.failed) == (5, 1)
        read = sum(len(asked.prompt) for asked in backend.asked)
        assert usage.input_tokens == read and read == 5 * (input or read // 5)
        assert usage.output_tokens == 5 * output and usage.total_tokens == read + 5 * output
        cached = 0 if endpoint == "/v1/embeddings" else 10
        assert usage.input_tokens_details.cached_tokens == cached
        assert usage.output_tokens_details.reasoning_tokens == 0


def test_a_batch_has_one_log_line_at_its_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "bankfull.request")

    def logged() -> list[dict[str, Any]]:
        return [record.fields for record in caplog.records if record.getMessage() == "batch"]  # type: ignore[attr-defined]

    with served(whole_app(tmp_path, Scripted(["ab", "cd"]))) as url, client_at(url) as client:
        lines = [line(f"{number}", body={"model": "tiny", "prompt": "xyz"}) for number in range(5)]
        good = ended(client, submit(client, [*lines, line("bad", body={"nonsense": 1})]).id)
        failed = ended(client, submit(client, ["nonsense"]).id)
        until = time.monotonic() + 5
        while len(logged()) < 2 and time.monotonic() < until:
            time.sleep(0.01)
    first, second = logged()
    assert 0 <= first.pop("seconds") < 60
    assert first == {
        "id": good.id,
        "key": "me",
        "endpoint": "/v1/completions",
        "status": "completed",
        "total": 6,
        "completed": 5,
        "failed": 1,
        "prompt_tokens": 15,
        "completion_tokens": 20,
        "cached_tokens": 0,
    }
    assert (second["id"], second["status"], second["total"]) == (failed.id, "failed", 0)


def test_latency_histograms_count_online_calls_only(tmp_path: Path) -> None:
    metrics = ServiceMetrics()
    backend = WatchedBackend(Scripted(["ab", "cd"]), metrics, Keyring())

    def observed() -> dict[str, int]:
        return {each.name: sum(each.counts) for each in metrics.families if isinstance(each, Histogram)}

    def count(outcome: str) -> None:
        metrics.batch_requests.add(1, outcome)

    body = {"model": "tiny", "prompt": "xyz"}
    with served(whole_app(tmp_path, backend, count=count)) as url, client_at(url) as client:
        lines = [line(f"{number}", body=body) for number in range(5)]
        ended(client, submit(client, [*lines, line("bad", body={"nonsense": 1})]).id)
        batch = observed()
        assert {name: number for name, number in batch.items() if name.endswith("_seconds")} == dict.fromkeys(
            (
                "time_to_first_token_seconds",
                "inter_token_latency_seconds",
                "e2e_request_latency_seconds",
                "request_queue_time_seconds",
                "request_prefill_time_seconds",
                "request_decode_time_seconds",
                "request_inference_time_seconds",
            ),
            0,
        )
        assert batch["request_prompt_tokens"] == batch["request_generation_tokens"] == 5
        assert metrics.batch_requests.values == {("completed",): 5, ("failed",): 1}
        client.completions.create(model="tiny", prompt="xyz")
    assert {name: number - batch[name] for name, number in observed().items()} == dict.fromkeys(batch, 1)
    assert (metrics.prompt_tokens.values[()], metrics.batch_prompt_tokens.values[()]) == (18, 15)
    assert (metrics.generation_tokens.values[()], metrics.batch_generation_tokens.values[()]) == (24, 20)


def test_lines_are_charged_to_their_key_and_wait_until_it_has_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bankfull.serve.batch.runner.LONGEST_BACKOFF", 0.01)
    now = 0.0
    _, key = new_key("me", tokens=100)
    keyring = Keyring((key,), clock=lambda: now)
    backend = WatchedBackend(Scripted(["ab", "cd"]), ServiceMetrics(), keyring)
    app = whole_app(tmp_path, backend, keyring, wait=keyring.batch_wait)
    with served(app) as url, client_at(url) as client:
        id = submit(client, [line(f"{number}", body={"model": "tiny", "prompt": "xyz"}) for number in range(60)]).id
        rounds, deadline = 0, time.monotonic() + 60
        while client.batches.retrieve(id).status != "completed":
            assert time.monotonic() < deadline
            time.sleep(0.05)
            if (seconds := keyring.batch_wait("me")) > 0:
                now += seconds + 0.01
                rounds += 1
        counts = ended(client, id).request_counts
        assert (counts.completed, counts.failed) == (60, 0)
        # The batch had to wait for all tokens except those of the first minute and those that the last 12 lines in
        # flight overdrew.
        assert rounds > 1 and now >= (60 * 7 - 100 - 12 * 7) / 100 * 60, "it ended before its rate limit allowed"


def test_a_batch_without_tokens_does_not_delay_other_owners(tmp_path: Path) -> None:
    poor = {"Bearer poor"}
    app = batch_app(tmp_path, RandomHandler(9, trouble=0.0), wait=lambda owner: 0.02 if owner in poor else 0.0)
    with served(app) as url:
        waits, goes_on = client_at(url, "poor"), client_at(url, "rich")
        first = submit(waits, [line(str(number)) for number in range(50)]).id
        assert ended(goes_on, submit(goes_on, [line(str(number)) for number in range(50)]).id).status == "completed"
        batch = waits.batches.retrieve(first)
        assert batch.status in ("validating", "in_progress")
        assert batch.request_counts is not None and batch.request_counts.completed == 0
        poor.clear()
        assert ended(waits, first).request_counts.completed == 50


@pytest.mark.parametrize(
    "call",
    ["open_batches", "refresh", "clear_lines", "add_lines", "start", "pending", "record", "finalize", "conclude"],
)
def test_a_database_error_anywhere_delays_a_batch_and_is_logged_but_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    """Errors other than a full disk, such as an I/O error or a damaged page."""
    inner, failures = getattr(BatchStore, call), [sqlite3.OperationalError("disk I/O error") for _ in range(2)]

    def failing(self: BatchStore, *arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return inner(self, *arguments)

    with client_of(tmp_path, RandomHandler(3, trouble=0.0)) as client, caplog.at_level(logging.ERROR):
        monkeypatch.setattr(BatchStore, call, failing)
        batch = ended(client, submit(client, [line(f"{number}") for number in range(30)]).id)
        assert batch.status == "completed" and batch.request_counts.completed == 30
        found = results(client, batch.output_file_id)
        assert [each["custom_id"] for each in found] == [str(number) for number in range(30)]
    assert not failures and sum("disk I/O error" in record.getMessage() for record in caplog.records) == 2


def test_a_batch_ends_with_one_result_per_line_even_if_any_task_is_cancelled(tmp_path: Path) -> None:
    supervisor = Supervisor()
    app = batch_app(tmp_path, RandomHandler(4, seconds=0.03), supervisor=supervisor)
    killed: Counter[str] = Counter()
    with served(app) as url, client_at(url) as client:
        id = submit(client, [line(f"{number}") for number in range(400)]).id
        while client.batches.retrieve(id).status not in ENDED:
            for name, tasks in supervisor.running.items():
                if tasks and killed[name] < 3:  # every restart waits longer
                    tasks[0].get_loop().call_soon_threadsafe(tasks[0].cancel)
                    killed[name] += 1
                    break
            time.sleep(0.01)
        batch = ended(client, id)
        assert batch.status == "completed" and batch.request_counts.completed == 400
        found = results(client, batch.output_file_id)
        assert [each["custom_id"] for each in found] == [str(number) for number in range(400)]
    assert killed.keys() == supervisor.running.keys() and len(killed) == 4


def test_a_key_of_the_environment_owns_its_files_at_any_position_in_the_list(tmp_path: Path) -> None:
    one, two = "the-first-secret-key", "the-second-secret-key"
    with served(guarded_app(tmp_path, f"{one},{two}")) as url, client_at(url, one) as client:
        batch = ended(client, submit(client, [line("a")]).id)
        files = {file.id for file in client.files.list()}
    assert len(files) == 2
    for keys in (two, f"{two},{one}"):
        with served(guarded_app(tmp_path, keys)) as url, client_at(url, two) as client:
            assert not list(client.files.list()) and not list(client.batches.list())
            for id in files:
                with pytest.raises(openai.NotFoundError):
                    client.files.content(id)
            with pytest.raises(openai.NotFoundError):
                client.batches.retrieve(batch.id)
            if one in keys:
                with client_at(url, one) as owner:
                    assert {file.id for file in owner.files.list()} == files
