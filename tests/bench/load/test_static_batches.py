"""A server with static batches starts a request only when its batch is complete."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from bankfull.bench.load.client import RequestOptions
from bankfull.bench.load.run import LoadRunner, LoadTest
from bankfull.bench.load.server import ServerUnderTest, parse_address
from bankfull.bench.load.workloads import Synthetic, parse_lengths
from bankfull.errors import ConfigError
from bankfull.traffic.arrivals import Arrivals

BATCH = 4
LONGEST_WAIT = 20.0
"""Seconds after which a request whose batch stays incomplete fails."""


class BatchingServer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    complete: threading.Barrier

    def do_GET(self) -> None:
        card = {"id": "tiny", "owned_by": "bankfull", "static_batch": BATCH}
        known = self.path == "/v1/models"
        self._answer(200 if known else 404, json.dumps({"data": [card]} if known else {}).encode(), "application/json")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        if "completions" not in self.path:
            return self._answer(404, b"{}", "application/json")
        try:
            self.complete.wait(LONGEST_WAIT)
        except threading.BrokenBarrierError:
            return self._answer(500, b"{}", "application/json")
        events = [{"choices": [{"text": "a", "finish_reason": "length"}]}]
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        self._answer(200, body.encode(), "text/event-stream")

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ServerUnderTest]:
    handler = type("Handler", (BatchingServer,), {"complete": threading.Barrier(BATCH)})
    listening = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=listening.serve_forever, daemon=True)
    thread.start()
    yield ServerUnderTest(parse_address(f"http://127.0.0.1:{listening.server_port}"))
    listening.shutdown()
    listening.server_close()
    thread.join()


def load(requests: int, **options: Any) -> LoadTest:
    workload = Synthetic(parse_lengths("6"), parse_lengths("1"))
    return LoadTest(
        workload, Arrivals(float("inf")), requests, request_options=RequestOptions(**options), prompts="text"
    )


def test_the_test_request_is_a_whole_batch_where_the_server_waits_for_one(server: ServerUnderTest) -> None:
    told: list[str] = []
    report = LoadRunner(server).run(load(2 * BATCH), advance=lambda done, note: told.append(note))
    assert server.static_batch == BATCH and len(report.measured.good) == 2 * BATCH
    assert "waiting for the answer to a test request" in told


def test_requests_that_would_wait_forever_for_their_batch_are_refused(server: ServerUnderTest) -> None:
    runner = LoadRunner(server)
    with pytest.raises(ConfigError, match=r"static batches of 4 requests, so that the last 2 of 10 .* multiple of 4"):
        runner.run(load(10))
    with pytest.raises(ConfigError, match=r"--max-concurrency 3 never sends so many"):
        runner.run(load(8, max_concurrency=3))
    with pytest.raises(ConfigError, match=r"a sweep begins with single ones"):
        runner.alone(load(8))
