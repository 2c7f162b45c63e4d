"""The response cache over HTTP: which calls it answers, for whom, and what tells a client so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from bankfull.serve.answers.cache import ResponseCache
from bankfull.serve.answers.store import MemoryAnswers
from bankfull.serve.app import create_app
from bankfull.serve.engine.backend import EngineDied
from bankfull.serve.guard.checks import access_policy
from bankfull.serve.guard.keys import Keyring, new_key
from bankfull.serve.guard.layers import protect
from bankfull.serve.telemetry.metrics import ServiceMetrics
from bankfull.serve.telemetry.watch import WatchedBackend
from tests.serve.scripted import Scripted, scripted_texts, settings
from tests.serve.server import served
from tests.serve.test_ends import real_server

MESSAGES = [{"role": "user", "content": "Hello"}]
CALLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "temperature": 0},
    "/v1/completions": {"prompt": "Hello", "temperature": 0},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9, "temperature": 0},
    "/v1/responses": {"input": "Hello", "temperature": 0},
    "/v1/embeddings": {"input": "Hello"},
}


@contextmanager
def cached_server(backend: Scripted, size: int = 1 << 20) -> Iterator[tuple[str, ResponseCache]]:
    cache = ResponseCache(MemoryAnswers(size), lambda: backend.facts, {"options": {}})
    with served(create_app(backend, scripted_texts(), settings(), response_cache=cache)) as url:
        yield url, cache


def ask(url: str, path: str, headers: dict[str, str] | None = None, **changes: Any) -> httpx.Response:
    return httpx.post(url + path, json={**CALLS[path], **changes}, headers=headers)


def outcome(response: httpx.Response) -> str | None:
    return response.headers.get("x-response-cache")


@pytest.mark.parametrize("path", CALLS)
def test_an_exact_repetition_gets_the_same_answer_without_the_engine(path: str) -> None:
    backend = Scripted()
    with cached_server(backend) as (url, _):
        first, second = (
            ask(url, path),
            ask(url, path, user="somebody else", timeout=9) if path != "/v1/messages" else (ask(url, path, timeout=9)),
        )
    assert (first.status_code, outcome(first), outcome(second)) == (200, "miss", "hit")
    assert first.content == second.content and len(backend.asked) == 1


@pytest.mark.parametrize("path", [path for path in CALLS if path != "/v1/embeddings"])
def test_a_stream_is_replayed_as_a_stream_in_its_pieces(path: str) -> None:
    backend = Scripted(["The", " river", " runs"])
    with cached_server(backend) as (url, _):
        first, second, whole = ask(url, path, stream=True), ask(url, path, stream=True), ask(url, path)
    assert (outcome(first), outcome(second), outcome(whole)) == ("miss", "hit", "miss")
    assert first.content == second.content and len(backend.asked) == 2
    assert second.headers["content-type"].startswith("text/event-stream")
    assert second.text.count("data: ") >= 4


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": None},
        {"temperature": 0.1},
        {"temperature": None, "top_p": 0.5},
        {"temperature": 0, "explain": True},
        {"temperature": 0, "stream": True, "stream_options": {"include_drafts": True}},
        {"temperature": None, "seed": None},
    ],
    ids=str,
)
def test_a_call_that_may_be_answered_differently_always_runs(changes: dict[str, Any]) -> None:
    backend = Scripted(drafts=[None, None])  # type: ignore[list-item]
    with cached_server(backend) as (url, _):
        told = [ask(url, "/v1/chat/completions", **changes) for _ in range(2)]
    assert [outcome(response) for response in told] == [None, None] and len(backend.asked) == 2


def test_a_seed_makes_a_call_deterministic() -> None:
    backend = Scripted()
    with cached_server(backend) as (url, _):
        told = [ask(url, "/v1/chat/completions", temperature=0.7, seed=seed) for seed in (1, 1, 2)]
    assert [outcome(response) for response in told] == ["miss", "hit", "miss"]


def test_a_call_that_pins_a_prefix_always_runs() -> None:
    backend = Scripted()
    with cached_server(backend) as (url, _):
        for _ in range(2):
            assert outcome(ask(url, "/v1/messages", cache_control={"type": "ephemeral"})) is None
    assert len(backend.asked) == 2


@pytest.mark.parametrize(
    "changes", [{"max_tokens": 5}, {"messages": [*MESSAGES, *MESSAGES]}, {"cache_salt": "x"}, {"stop": ["x"]}], ids=str
)
def test_any_other_parameter_is_another_call(changes: dict[str, Any]) -> None:
    backend = Scripted()
    with cached_server(backend) as (url, _):
        assert [outcome(ask(url, "/v1/chat/completions", **more)) for more in ({}, changes)] == ["miss", "miss"]


def test_the_client_may_ask_for_a_new_answer_or_keep_it_out_of_the_cache() -> None:
    backend, path = Scripted(), "/v1/chat/completions"
    with cached_server(backend) as (url, _):
        assert outcome(ask(url, path, {"cache-control": "no-store"})) is None
        assert outcome(ask(url, path)) == "miss"
        backend.pieces = ("Something", " new")
        assert outcome(ask(url, path, {"cache-control": "no-cache"})) == "miss"
        found = ask(url, path)
    assert outcome(found) == "hit" and "Something new" in found.text


def test_other_weights_or_another_precision_find_nothing() -> None:
    backend, path = Scripted(), "/v1/chat/completions"
    with cached_server(backend) as (url, _):
        ask(url, path)
        assert backend.facts is not None
        for change in ({"weights": "other"}, {"dtype": "bfloat16"}, {"name": "other"}):
            backend.facts = msgspec.structs.replace(backend.facts, **change)
            assert outcome(ask(url, path)) == "miss"
        assert outcome(ask(url, path)) == "hit"


def test_errors_and_broken_streams_are_not_kept() -> None:
    backend, path = Scripted(error=EngineDied("It has ended.")), "/v1/chat/completions"
    with cached_server(backend) as (url, cache):
        assert ask(url, path).status_code >= 500
        ask(url, path, stream=True)
        assert ask(url, path, temperature=0, top_p=-1).status_code == 400
        assert cache._store.entries == 0
        backend.error = None
        assert outcome(ask(url, path)) == "miss" and outcome(ask(url, path)) == "hit"


def test_a_huge_answer_does_not_evict_all_others() -> None:
    backend = Scripted(["word "] * 400)
    with cached_server(backend, size=16 << 10) as (url, cache):
        assert outcome(ask(url, "/v1/chat/completions", stream=True)) == "miss"
        assert cache._store.entries == 0
        assert outcome(ask(url, "/v1/chat/completions", stream=True)) == "miss"


def test_keys_share_nothing_and_metrics_count() -> None:
    (alice, first), (bob, second) = new_key("alice"), new_key("bob")
    keyring, metrics, scripted = Keyring((first, second)), ServiceMetrics("tiny"), Scripted()
    backend = WatchedBackend(scripted, metrics, keyring)
    cache = ResponseCache(MemoryAnswers(1 << 20), lambda: backend.facts, {})
    metrics.more.append(cache.families)
    app = create_app(backend, scripted_texts(), settings(), response_cache=cache)
    access = access_policy(keyring, host="127.0.0.1", share_prefixes=True)
    with served(protect(app, backend, access, metrics)) as url:
        keys = [{"x-api-key": secret} for secret in (alice, bob, alice)]
        assert [outcome(ask(url, "/v1/completions", key)) for key in keys] == ["miss", "miss", "hit"]
        ask(url, "/v1/completions", keys[0], temperature=1)
        shown = httpx.get(f"{url}/metrics", headers=keys[0]).text
    for kind, count in (("hit", 1), ("miss", 2), ("bypass", 1)):
        assert f'response_cache_requests_total{{model_name="tiny",outcome="{kind}"}} {count}' in shown
    assert 'response_cache_entries{model_name="tiny"} 2' in shown


def test_a_restarted_server_answers_from_its_file(tmp_path: Path) -> None:
    options = ("--response-cache", f"1MiB:{tmp_path / 'answers.db'}")
    body = {"prompt": "The river", "max_tokens": 6, "temperature": 0}
    told = []
    for _ in range(2):
        with real_server(*options) as (url, _process):
            told.append(httpx.post(f"{url}/v1/completions", json=body, timeout=60))
    assert [outcome(response) for response in told] == ["miss", "hit"]
    assert told[0].content == told[1].content
