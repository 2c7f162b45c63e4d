"""Responses on the wire: the head and the first part of the body are one write, so one packet and one wake-up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from bankfull.serve.guard.listen import Connection
from tests.serve.listening import listening

WRITES: list[bytes] = []


class Recorder:
    """A transport that records each write."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def write(self, data: bytes) -> None:
        WRITES.append(bytes(data))
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Recorded(Connection):
    def connection_made(self, transport: Any) -> None:
        super().connection_made(Recorder(transport))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    WRITES.clear()
    yield


def answer(*bodies: bytes | None, length: int | None = None) -> Any:
    """An application that responds with these body parts; None is an iteration of the event loop without one."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [] if length is None else [(b"content-length", str(length).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for body in bodies:
            if body is None:
                await asyncio.sleep(0.05)
            else:
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return app


def ask(app: Any, request: bytes = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n") -> bytes:
    with listening(app, http=Recorded) as server:
        return server.send(request)


def test_a_complete_response_is_one_write() -> None:
    received = ask(answer(b"all of it", length=9))
    assert received.startswith(b"HTTP/1.1 200 OK\r\n") and received.endswith(b"\r\n\r\nall of it")
    assert WRITES[0] == received and not any(WRITES[1:])


def test_a_stream_sends_its_head_with_the_first_event_and_then_every_event() -> None:
    received = ask(answer(b"first", None, b"second"))
    assert b"".join(WRITES) == received
    assert WRITES[0].startswith(b"HTTP/1.1 200") and WRITES[0].endswith(b"5\r\nfirst\r\n")
    assert WRITES[1] == b"6\r\nsecond\r\n"


def test_a_head_without_a_body_part_is_sent_in_the_next_iteration() -> None:
    received = ask(answer(None, b"late"))
    assert b"".join(WRITES) == received
    assert WRITES[0].endswith(b"\r\n\r\n") and WRITES[1] == b"4\r\nlate\r\n"


def test_a_response_without_a_body_is_sent_before_the_connection_closes() -> None:
    received = ask(answer(length=0), b"HEAD / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert received.startswith(b"HTTP/1.1 200 OK\r\n") and received.endswith(b"\r\n\r\n")


def test_responses_of_one_connection_keep_their_order() -> None:
    get, head = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n"
    last = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    received = ask(answer(b"body!", length=5), get + head + last)
    parts = received.split(b"HTTP/1.1 200 OK\r\n")[1:]
    assert [part.endswith(b"body!") for part in parts] == [True, False, True]


def test_expect_100_continue_is_answered() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        await answer(body, length=len(body))(scope, receive, send)

    head = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n"
    received = ask(app, head + b"hi")
    assert b"HTTP/1.1 200 OK\r\n" in received and received.endswith(b"hi")
