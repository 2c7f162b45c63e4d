"""Logs: one line per request, as text or as JSON, without the contents of the request."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from bankfull.serve.guard.checks import Guard, access_policy
from bankfull.serve.guard.keys import Keyring, new_key
from bankfull.serve.telemetry.log import Logs, log_trace
from bankfull.serve.telemetry.metrics import ServiceMetrics
from bankfull.serve.telemetry.trace import Trace
from bankfull.serve.telemetry.watch import Watch
from tests.serve.guard.test_checks import echo
from tests.serve.listening import listening


@contextmanager
def captured(*, json: bool = False) -> Iterator[io.StringIO]:
    stream = io.StringIO()
    logs = Logs(json=json, stream=stream)
    try:
        yield stream
    finally:
        logs.close()


def made_trace() -> Trace:
    _, key = new_key("alice")
    return Trace(
        "req-1",
        "POST",
        "/v1/x",
        0.0,
        key=key,
        route="/v1/x",
        status=200,
        prompt_tokens=12,
        completion_tokens=5,
        cached_tokens=4,
        ttft=0.01234,
    )


def test_a_text_line() -> None:
    with captured() as stream:
        log_trace(made_trace(), 1.5)
    assert stream.getvalue().endswith(
        "info    request id=req-1 key=alice method=POST route=/v1/x status=200 prompt_tokens=12 completion_tokens=5 "
        "cached_tokens=4 ttft=0.0123 seconds=1.5\n"
    )


def test_a_json_line() -> None:
    with captured(json=True) as stream:
        log_trace(made_trace(), 1.5)
        try:
            raise ValueError("broken")
        except ValueError:
            logging.getLogger("bankfull.serve").exception("oh\nno")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first["key"] == "alice" and first["ttft"] == 0.0123 and first["level"] == "info"
    assert second["message"] == "oh\nno" and "ValueError: broken" in second["exception"]


def test_clients_cannot_forge_log_lines() -> None:
    with captured() as stream:
        log_trace(Trace("id", "GET", "/a\n2026-01-01 info \x1b[31m fake", 0.0, status=404), 0.1)
    assert len(stream.getvalue().splitlines()) == 1 and "\x1b" not in stream.getvalue()


def test_bodies_are_logged_only_if_turned_on() -> None:
    for logged in (False, True):
        with captured() as stream:
            app = Watch(Guard(echo, access_policy(Keyring(), host="127.0.0.1"), keep_bodies=logged), ServiceMetrics())
            with listening(app) as server:
                httpx.post(server.url + "/v1/x?secret=query", content=b'{"prompt": "a secret"}')
                httpx.post(server.url + "/live", content=b"")
        assert ("a secret" in stream.getvalue()) is logged
        assert "status=200" in stream.getvalue() and "query" not in stream.getvalue()
