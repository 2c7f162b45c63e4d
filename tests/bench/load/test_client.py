"""The client with servers that reject, disconnect and are slow; and the requests it sends."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import pytest

from bankfull.bench.load.client import LoadClient, RequestOptions, ask_once
from bankfull.bench.load.server import ServerUnderTest, parse_address
from bankfull.bench.load.workloads import Conversation, ConversationTurn
from bankfull.errors import ConfigError
from tests.bench.load.kit import make_conversations, stamped


@contextmanager
def canned(answer: bytes) -> Iterator[ServerUnderTest]:
    """A server that replies to any request with these bytes and closes the connection."""
    listening = socket.create_server(("127.0.0.1", 0))

    def answer_on(connection: socket.socket) -> None:
        with connection:
            if connection.recv(1 << 16):
                connection.sendall(answer)

    def serve() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=answer_on, args=(connection,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield ServerUnderTest(parse_address(f"http://127.0.0.1:{listening.getsockname()[1]}"), name="canned")
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()


def calls(server: ServerUnderTest) -> list[dict[str, object]]:
    found = server.ask("GET", "/stop").json
    assert isinstance(found, list)
    return found


def test_the_request_body_has_prompt_and_options() -> None:
    with stamped() as server:
        how = RequestOptions(extra={"temperature": 0.5, "top_p": 0.9}, ignore_eos=False)
        ask_once(server, how, Conversation((ConversationTurn([3, 4, 5], 7),)))
        ask_once(server, RequestOptions(), Conversation((ConversationTurn("words", 2),)))
        first, second = calls(server)
    assert first == {
        "model": "stamps",
        "prompt": [3, 4, 5],
        "max_tokens": 7,
        "stream": True,
        "temperature": 0.5,
        "top_p": 0.9,
    }
    assert second["ignore_eos"] is True and second["prompt"] == "words" and second["temperature"] == 0.0


def test_a_conversation_continues_with_its_history_after_a_pause() -> None:
    talk = Conversation((ConversationTurn("one", 2), ConversationTurn("two", 3), ConversationTurn("three", 1)))
    with stamped() as server:
        outcomes = LoadClient(server, RequestOptions("chat", pause=0.05)).run([talk], [0.0])
        asked = calls(server)
    assert [one.turn for one in outcomes] == [0, 1, 2] and [one.output_tokens for one in outcomes] == [2, 3, 1]
    roles = [[message["role"] for message in call["messages"]] for call in asked]  # type: ignore[index, attr-defined]
    assert roles == [["user"], ["user", "assistant", "user"], ["user", "assistant", "user", "assistant", "user"]]
    said = asked[2]["messages"]
    assert [m["content"] for m in said] == [  # type: ignore[index, attr-defined]
        "one",
        outcomes[0].text,
        "two",
        outcomes[1].text,
        "three",
    ]
    for before, after in pairwise(outcomes):
        assert after.due == pytest.approx(before.ended + 0.05, abs=1e-6), "the next turn is due after the pause"


def test_rejections_and_lost_connections_are_failures_with_a_reason() -> None:
    with stamped(refuse=4) as server:
        outcomes = LoadClient(server, RequestOptions()).run(make_conversations(3, 12), [0.01 * n for n in range(12)])
    failed = [one for one in outcomes if one.error]
    assert len(outcomes) == 12 and len(failed) == 3
    assert {one.error for one in failed} == {"status 429: no room"}
    with stamped(leave=1) as server:
        lost = LoadClient(server, RequestOptions()).run(make_conversations(3, 2), [0.0, 0.0])
    assert all(one.error is not None and "closed before the response" in one.error for one in lost)


def test_a_connection_that_was_closed_while_idle_is_replaced_unnoticed() -> None:
    with stamped(leave=3) as server:
        outcomes = LoadClient(server, RequestOptions()).run(make_conversations(2, 5), [0.05 * n for n in range(5)])
    assert [one.error for one in outcomes] == [None] * 5


def test_after_a_failure_a_conversation_is_over() -> None:
    talk = Conversation((ConversationTurn("one", 2), ConversationTurn("two", 2), ConversationTurn("three", 2)))
    with stamped(refuse=2) as server:
        outcomes = LoadClient(server, RequestOptions("chat")).run([talk], [0.0])
    assert [one.error for one in outcomes] == [None, "status 429: no room"]


def test_waiting_for_the_concurrency_limit_counts_as_latency() -> None:
    with stamped(wait=0.1) as server:
        outcomes = LoadClient(server, RequestOptions(max_concurrency=1)).run(make_conversations(1, 4), [0.0] * 4)
    took = sorted(one.e2e for one in outcomes)
    assert all(seconds > 0.1 * (n + 1) - 1e-3 for n, seconds in enumerate(took))
    assert max(one.late or 0.0 for one in outcomes) > 0.25


def test_a_request_that_times_out_is_a_failure() -> None:
    with stamped(wait=5.0) as server:
        outcomes = LoadClient(server, RequestOptions(timeout=0.3)).run(make_conversations(1, 3), [0.0, 0.05, 0.1])
    assert [one.error for one in outcomes] == ["timed out after 0.3 s"] * 3
    with stamped(wait=5.0) as server:
        queued = LoadClient(server, RequestOptions(timeout=0.3, max_concurrency=1)).run(
            make_conversations(1, 3), [0.0, 0.0, 0.0]
        )
    assert [one.error for one in queued] == ["timed out after 0.3 s"] * 3


EVENT = b'data: {"choices":[{"index":0,"text":"a","finish_reason":"length"}]}\n\n'


def test_an_answer_may_end_with_its_connection() -> None:
    answer = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + EVENT
    with canned(answer) as server:
        assert ask_once(server, RequestOptions(), make_conversations(1, 1)[0]).text == "a"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"SSH-2.0-x\r\n", "invalid HTTP"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 999\r\n\r\n" + EVENT, "closed before the response was complete"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nnope", "ended before the output was complete"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\ndata: {\n", "not a chunk of a completion"),
        (b"HTTP/1.1 500 X\r\ncontent-length: 4\r\n\r\noops", "status 500: oops"),
        (b'HTTP/1.1 200 OK\r\ncontent-length: 35\r\n\r\ndata: {"error":{"message":"broke"}}', "broke"),
    ],
)
def test_invalid_responses_are_reported_in_one_sentence(answer: bytes, says: str) -> None:
    with canned(answer) as server, pytest.raises(ConfigError, match=says):
        ask_once(server, RequestOptions(), make_conversations(1, 1)[0])


def test_an_unreachable_server_is_reported_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = parse_address(f"http://127.0.0.1:{free.getsockname()[1]}")
    gone = ServerUnderTest(address, name="x")
    with pytest.raises(ConfigError, match="cannot be reached"):
        ask_once(gone, RequestOptions(), make_conversations(1, 1)[0])
    with pytest.raises(ConfigError, match="cannot be reached"):
        replace(gone, name=None).model  # noqa: B018


@pytest.mark.parametrize("bad", ["ftp://x", "http://", "nothing", "http://127.0.0.1:99999"])
def test_bad_addresses_are_refused(bad: str) -> None:
    with pytest.raises(ConfigError):
        parse_address(bad)


def test_chats_need_texts() -> None:
    with stamped() as server, pytest.raises(ConfigError, match="text"):
        ask_once(server, RequestOptions("chat"), Conversation((ConversationTurn([1, 2], 1),)))
