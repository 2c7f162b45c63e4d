"""The engine process by itself: a socket, messages, and an end when the socket ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from bankfull.sample.params import SamplingParams, StructuredOutput
from bankfull.serve import outbox
from bankfull.serve.outbox import ApiGone, Outbox
from bankfull.serve.wire import (
    HEADER,
    MAX_MESSAGE,
    Abort,
    Configure,
    FromEngine,
    Ready,
    Refused,
    Step,
    Submit,
    ToEngine,
    body_length,
    decoder,
    pack,
)
from tests.serve.engine_kit import ENDLESS, OPTIONS, PROMPT
from tests.tiny import speaking_folder


class Process:
    """A worker, and the API's end of its socket, read by hand."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "bankfull.serve.worker", str(theirs.fileno())]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE)
        self.socket.settimeout(60.0)
        self._decode = decoder(FromEngine).decode

    def send(self, message: Any) -> None:
        self.socket.sendall(pack(message))

    def next(self) -> Any:
        return self._decode(self._exactly(body_length(self._exactly(HEADER))))

    def until(self, kind: type) -> Any:
        while not isinstance(message := self.next(), kind):
            pass
        return message

    def _exactly(self, count: int) -> bytes:
        read = b""
        while len(read) < count:
            got = self.socket.recv(count - len(read))
            assert got, "the engine has left"
            read += got
        return read


@pytest.fixture(scope="module")
def worker() -> Iterator[Process]:
    made = Process()
    try:
        made.send(Configure(str(speaking_folder()), OPTIONS, threads=2))
        made.until(Ready)
        yield made
    finally:
        made.process.kill()
        made.process.wait()
        made.socket.close()


def test_it_gives_way_to_others(worker: Process) -> None:
    threads = [int(name) for name in os.listdir(f"/proc/{worker.process.pid}/task")]
    assert len(threads) > 2
    assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads} == {os.getpriority(os.PRIO_PROCESS, 0) + 5}


def test_an_idle_engine_costs_nothing(worker: Process) -> None:
    def spent() -> float:
        with open(f"/proc/{worker.process.pid}/stat") as file:
            fields = file.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    time.sleep(0.3)
    before = spent()
    time.sleep(1.5)
    assert spent() - before <= 0.02


def test_a_message_that_nobody_understands_is_refused_and_the_engine_goes_on(worker: Process) -> None:
    body = msgspec.msgpack.encode({"type": "submit", "id": 77, "prompt": "text", "params": {}})
    worker.socket.sendall(len(body).to_bytes(HEADER, "little") + body)
    refused = worker.until(Refused)
    assert (refused.id, refused.kind) == (77, "internal")


def test_interrupts_are_left_to_the_api_and_the_end_of_the_socket_ends_it(worker: Process) -> None:
    worker.process.send_signal(signal.SIGINT)
    worker.process.send_signal(signal.SIGTERM)
    worker.send(Submit(1, PROMPT, ENDLESS))
    assert worker.until(Step).pieces[0].id == 1
    worker.send(Abort([1]))
    while (load := worker.until(Step).load).running:
        pass
    assert load.pages_used == 0
    worker.send(Submit(2, PROMPT, ENDLESS))
    worker.until(Step)
    worker.socket.close()
    assert worker.process.wait(5.0) == 0


def test_nonsense_and_giants_end_the_process() -> None:
    made = Process()
    with made.socket:
        made.socket.sendall((MAX_MESSAGE + 1).to_bytes(HEADER, "little"))
        assert made.process.wait(60.0) == 1
    assert b"longer than" in made.process.communicate()[1]


def test_params_survive_the_wire() -> None:
    params = SamplingParams(
        n=2, temperature=0.5, top_k=3, logit_bias={3: -1.5}, stop=["a", "b"], stop_token_ids=[4], bad_words=["x"],
        allowed_token_ids=[1, 2], min_tokens=1, max_tokens=9, seed=-5, logprobs=2, prompt_logprobs=1,
        structured=StructuredOutput(json={"type": "object"}),
    )  # fmt: skip
    submit = Submit(5, [1, 2], params, priority=3, salt="key", pool=None)
    assert decoder(ToEngine).decode(pack(submit)[HEADER:]) == submit


def test_a_slow_reader_neither_stops_the_writer_nor_loses_a_byte() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        box = Outbox(theirs)
        messages = [bytes([i % 251]) * 50_000 for i in range(100)]
        for message in messages:  # nobody reads yet: a writer that waited would wait for ever
            box.send(message)
        read = bytearray()
        while len(read) < 5_000_000:
            read += ours.recv(1 << 20)
        assert bytes(read) == b"".join(messages)


def test_a_reader_that_never_reads_counts_as_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MOST_WAITING", 1 << 20)
    monkeypatch.setattr(outbox, "PATIENCE", 0.2)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        box = Outbox(theirs)
        with pytest.raises(ApiGone):
            for _ in range(100):
                box.send(bytes(100_000))
