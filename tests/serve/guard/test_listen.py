"""Answers on the wire: a head and what follows it at once are one write, and so one packet and one wake-up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from bankfull.serve.guard.listen import Connection
from tests.serve.listening import listening

WRITES: list[bytes] = []


class Recorder:
    """A transport that notes each write."""

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
    """An application whose answer has these bodies; None is a turn of the event loop without one."""

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
        return server.say(request)


def test_a_whole_answer_is_one_write() -> None:
    said = ask(answer(b"all of it", length=9))
    assert said.startswith(b"HTTP/1.1 200 OK\r\n") and said.endswith(b"\r\n\r\nall of it")
    assert WRITES[0] == said and not any(WRITES[1:])


def test_a_stream_begins_with_its_first_event_and_goes_on_piece_by_piece() -> None:
    said = ask(answer(b"first", None, b"second"))
    assert b"".join(WRITES) == said
    assert WRITES[0].startswith(b"HTTP/1.1 200") and WRITES[0].endswith(b"5\r\nfirst\r\n")
    assert WRITES[1] == b"6\r\nsecond\r\n"


def test_a_head_that_nothing_follows_is_sent_all_the_same() -> None:
    said = ask(answer(None, b"late"))
    assert b"".join(WRITES) == said
    assert WRITES[0].endswith(b"\r\n\r\n") and WRITES[1] == b"4\r\nlate\r\n"


def test_an_answer_without_a_body_is_sent_before_the_connection_is_closed() -> None:
    said = ask(answer(length=0), b"HEAD / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert said.startswith(b"HTTP/1.1 200 OK\r\n") and said.endswith(b"\r\n\r\n")


def test_answers_of_one_connection_keep_their_order() -> None:
    get, head = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n"
    last = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    said = ask(answer(b"body!", length=5), get + head + last)
    parts = said.split(b"HTTP/1.1 200 OK\r\n")[1:]
    assert [part.endswith(b"body!") for part in parts] == [True, False, True]


def test_who_expects_to_be_told_to_go_on_is() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        await answer(body, length=len(body))(scope, receive, send)

    head = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n"
    said = ask(app, head + b"hi")
    assert b"HTTP/1.1 200 OK\r\n" in said and said.endswith(b"hi")
