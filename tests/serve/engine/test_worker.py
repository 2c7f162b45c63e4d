"""The engine process by itself: a socket, messages, and an end when the socket ends."""

from __future__ import annotations

import asyncio
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bankfull.handshake.proof import TAG, Seal, SessionKeys
from bankfull.sample.params import SamplingParams, StructuredOutput
from bankfull.serve.engine import engine_end
from bankfull.serve.engine.engine_end import ApiGone, Inbox, NotAMessage, Outbox
from bankfull.serve.engine.process import EngineConnection
from bankfull.serve.engine.wire import (
    HEADER,
    MAX_MESSAGE,
    Abort,
    Configure,
    Enqueue,
    FromEngine,
    LoadingPhase,
    Ready,
    Refused,
    RequestDone,
    StepMessage,
    ToEngine,
    body_length,
    decoder,
    pack,
)
from bankfull.submit import Submit
from tests.serve.engine_kit import ENDLESS, OPTIONS, PROMPT
from tests.tiny import speaking_folder


def failing(thread: str, error: BaseException) -> None:
    raise AssertionError(f"{thread} has failed") from error


class Process:
    """A worker, and the API's end of its socket, read by hand."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "bankfull.serve.engine.worker", str(theirs.fileno())]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE)
        self.socket.settimeout(60.0)
        self._decode = decoder(FromEngine).decode

    def send(self, message: Any) -> None:
        self.socket.sendall(pack(Enqueue(message) if isinstance(message, Submit) else message))

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


def test_a_long_prompt_is_prepared_beside_the_engine_and_can_be_aborted(worker: Process) -> None:
    worker.send(Submit([1] * 5000, ENDLESS, id=901))  # longer than the context: whoever checks it refuses it
    worker.send(Submit([1] * 5000, ENDLESS, id=902))
    worker.send(Abort([902]))
    worker.send(Submit(PROMPT, SamplingParams(max_tokens=1), id=903))
    refused, done = set(), set()
    while not (903 in done and 901 in refused):
        message = worker.next()
        if isinstance(message, Refused):
            refused.add(message.id)
            assert "5000 tokens" in message.message
        elif isinstance(message, StepMessage):
            done |= {end.id for end in message.done}
    assert done == {903}


@pytest.mark.skipif(sys.platform != "linux", reason="counts wake-ups as Linux does")
def test_an_idle_worker_sleeps_and_one_thread_answers(worker: Process) -> None:
    def wakeups() -> dict[str, int]:
        counted = {}
        for task in Path(f"/proc/{worker.process.pid}/task").iterdir():
            found = re.search(r"^voluntary_ctxt_switches:\s+(\d+)", (task / "status").read_text(), re.MULTILINE)
            assert found is not None
            counted[task.name] = int(found[1])
        return counted

    def settled() -> dict[str, int]:
        before = wakeups()
        for _ in range(100):
            time.sleep(0.2)
            if (now := wakeups()) == before:
                return now
            before = now
        raise AssertionError("it polls")

    before = settled()
    worker.send(Submit(PROMPT, SamplingParams(max_tokens=1), id=911))
    while not (isinstance(message := worker.next(), StepMessage) and message.done):
        pass
    after = settled()
    woken = {name for name in after if after[name] != before.get(name)}
    # The kernels have one more thread (see the fixture); no other one stands between the API and the engine.
    assert str(worker.process.pid) in woken and len(woken) <= 2


def answered(worker: Process, submit: Submit) -> tuple[dict[int, list[int]], RequestDone]:
    """The tokens of each sample that got any delta, and the end of the request."""
    worker.send(submit)
    tokens: dict[int, list[int]] = {}
    while True:
        message = worker.until(StepMessage)
        for delta in message.deltas:
            tokens.setdefault(delta.index, []).extend(delta.token_ids)
        if message.done:
            return tokens, message.done[0]


@pytest.mark.parametrize("grammar", [None, StructuredOutput(regex="[a-z ]{30}")], ids=["light", "prepared by a thread"])
def test_a_request_of_another_engine_is_continued(worker: Process, grammar: StructuredOutput | None) -> None:
    params = SamplingParams(n=3, seed=4, max_tokens=9, structured=grammar)
    whole, _ = answered(worker, Submit(PROMPT, params, id=921))
    before = [whole[0], whole[1][:4], []]
    later, done = answered(worker, Submit(PROMPT, params, id=922, generated=before, finished=[0]))
    assert later == {1: whole[1][4:], 2: whole[2]}
    assert done.output_tokens == sum(map(len, whole.values()))


def test_a_request_that_cannot_be_continued_is_refused(worker: Process) -> None:
    worker.send(Submit(PROMPT, SamplingParams(max_tokens=2, seed=1), id=931, generated=[[50, 51]]))
    refused = worker.until(Refused)
    assert (refused.id, refused.kind) == (931, "request") and "already ended" in refused.message


def test_interrupts_are_left_to_the_api_and_the_end_of_the_socket_ends_it(worker: Process) -> None:
    worker.process.send_signal(signal.SIGINT)
    worker.process.send_signal(signal.SIGTERM)
    worker.send(Submit(PROMPT, ENDLESS, id=1))
    while not (deltas := worker.until(StepMessage).deltas):  # a last report of the requests before may come first
        pass
    assert deltas[0].request_id == 1
    worker.send(Abort([1]))
    while (load := worker.until(StepMessage).load).running:
        pass
    assert load.pages_used == 0
    worker.send(Submit(PROMPT, ENDLESS, id=2))
    worker.until(StepMessage)
    worker.socket.close()
    assert worker.process.wait(60.0) == 0


def test_nonsense_and_giants_end_the_process() -> None:
    made = Process()
    with made.socket:
        made.socket.sendall((MAX_MESSAGE + 1).to_bytes(HEADER, "little"))
        assert made.process.wait(60.0) == 1
    assert b"longer than" in made.process.communicate()[1]


def test_params_survive_the_wire() -> None:
    params = SamplingParams(
        n=2,
        temperature=0.5,
        top_k=3,
        logit_bias={3: -1.5},
        stop=["a", "b"],
        stop_token_ids=[4],
        bad_words=["x"],
        allowed_token_ids=[1, 2],
        min_tokens=1,
        max_tokens=9,
        seed=-5,
        logprobs=2,
        prompt_logprobs=1,
        structured=StructuredOutput(json={"type": "object"}),
    )
    submit = Submit([1, 2], params, id=5, priority=3, salt="key", pool=None, generated=[[3], []], finished=[0])
    assert decoder(ToEngine).decode(pack(Enqueue(submit))[HEADER:]) == Enqueue(submit)


def test_a_slow_reader_neither_stops_the_writer_nor_loses_a_byte() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        box = Outbox(theirs, failing)
        messages = [bytes([i % 251]) * 50_000 for i in range(100)]
        for message in messages:  # nobody reads yet: a writer that waited would wait for ever
            box.send(message)
        read = bytearray()
        while len(read) < 5_000_000:
            read += ours.recv(1 << 20)
        assert bytes(read) == b"".join(messages)


def test_a_reader_that_never_reads_counts_as_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_end, "MOST_WAITING", 1 << 20)
    monkeypatch.setattr(engine_end, "PATIENCE", 0.2)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        box = Outbox(theirs, failing)
        with pytest.raises(ApiGone):
            for _ in range(100):
                box.send(bytes(100_000))


@pytest.mark.parametrize("cuts", [[1], [3, 5], [HEADER], []])
def test_messages_are_put_together_from_whatever_comes(cuts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_end, "READING_SHARE", math.inf)  # a busy machine must not cut the reading
    monkeypatch.setattr(engine_end, "MOST_READING_SECONDS", 60.0)
    ours, theirs = socket.socketpair()
    taken: list[Any] = []
    inbox = Inbox(theirs, taken.append)
    data = pack(Abort([1])) + pack(Abort([2])) + pack(Abort([3]))
    with ours, theirs:
        for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            ours.sendall(data[start:end])
            inbox.wait(0.0)
        assert [message.ids for message in taken] == [[1], [2], [3]]
        thread = threading.Thread(target=inbox.ring)
        thread.start()
        inbox.wait(None)  # returns, because another thread rings
        thread.join()
        inbox.ring()  # its own thread need not wake itself
        inbox.wait(0.0)
        ours.close()
        with pytest.raises(ApiGone):
            inbox.wait(None)


def test_a_flood_of_messages_leaves_time_for_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_end, "READING_SECONDS", 0.0)
    monkeypatch.setattr(engine_end, "MOST_READING_SECONDS", 0.0)
    ours, theirs = socket.socketpair()
    taken: list[Any] = []
    inbox = Inbox(theirs, taken.append)
    with ours, theirs:
        ours.sendall(b"".join(pack(Abort([number])) for number in range(3)))
        for turn in range(3):
            inbox.wait(None)  # never waits while a message is here
            assert len(taken) == turn + 1


def test_one_turn_reads_more_than_one_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a client that sends and leaves many requests during a long step delays those of others for many steps."""
    monkeypatch.setattr(engine_end, "READ_BYTES", 64)
    monkeypatch.setattr(engine_end, "READING_SECONDS", 60.0)
    monkeypatch.setattr(engine_end, "MOST_READING_SECONDS", 60.0)
    ours, theirs = socket.socketpair()
    taken: list[Any] = []
    inbox = Inbox(theirs, taken.append)
    with ours, theirs:
        ours.sendall(b"".join(pack(Abort([number])) for number in range(100)))
        inbox.wait(None)
        assert [message.ids for message in taken] == [[number] for number in range(100)]


# -- between machines


KEYS = SessionKeys(b"c" * 32, b"l" * 32)


@contextmanager
def sealed_inbox() -> Iterator[tuple[socket.socket, Inbox, list[Any], Seal]]:
    ours, theirs = socket.socketpair()
    taken: list[Any] = []
    with ours, theirs:
        yield ours, Inbox(theirs, taken.append, Seal(KEYS.of_caller)), taken, Seal(KEYS.of_caller)


def tagged(seal: Seal, *messages: ToEngine) -> list[bytes]:
    return [frame + seal.tag(frame) for frame in map(pack, messages)]


@pytest.mark.parametrize("cuts", [[1], [HEADER, 20], [30], []])
def test_messages_with_tags_are_put_together_from_whatever_comes(cuts: list[int]) -> None:
    with sealed_inbox() as (ours, inbox, taken, seal):
        data = b"".join(tagged(seal, Abort([1]), Abort([2]), Abort([3])))
        for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            ours.sendall(data[start:end])
            inbox.wait(0.0)
        assert [message.ids for message in taken] == [[1], [2], [3]]


@pytest.mark.parametrize("attack", ["changed", "repeated", "left out", "swapped", "added", "without a tag"])
def test_an_engine_between_machines_takes_only_what_its_server_has_sent(attack: str) -> None:
    with sealed_inbox() as (ours, inbox, taken, seal):
        first, second, third = tagged(seal, Abort([1]), Abort([2]), Abort([3]))
        added = tagged(Seal(b"x" * 32), Abort([4]))
        frames = {
            "changed": [first, second[:-TAG].replace(b"\x02", b"\x05") + second[-TAG:]],
            "repeated": [first, first],
            "left out": [first, third],
            "swapped": [first, third, second],
            "added": [first, *added],
            "without a tag": [first, pack(Abort([2])), pack(Abort([3])), pack(Abort([4]))],
        }[attack]
        ours.sendall(b"".join(frames))
        with pytest.raises(NotAMessage):
            for _ in range(len(frames)):
                inbox.wait(0.0)
        assert [message.ids for message in taken] == [[1]]


def test_what_an_engine_says_has_tags_in_the_order_of_its_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    messages = [pack(Abort([number] * 5000)) for number in range(64)]  # more than the socket takes at once
    with ours, theirs:
        box, seal = Outbox(theirs, failing, Seal(KEYS.of_listener)), Seal(KEYS.of_listener)
        for message in messages:
            box.send(message)
        for message in messages:
            got = exactly(ours, len(message) + TAG)
            assert got[:-TAG] == message and seal.opens(got[-TAG:], got[:-TAG])


@pytest.mark.parametrize("attack", ["", "changed", "repeated"])
def test_a_server_takes_only_what_its_engine_between_machines_has_said(attack: str) -> None:
    async def receive() -> None:
        told: list[Any] = []
        engine = Remote(told.append)
        engine.sealed(KEYS)
        seal = Seal(KEYS.of_listener)
        first, second = (frame + seal.tag(frame) for frame in (pack(LoadingPhase("a")), pack(LoadingPhase("b"))))
        engine.data_received(first[:7])
        engine.data_received(first[7:])
        engine.data_received({"": second, "changed": second.replace(b"b", b"c"), "repeated": first}[attack])
        assert [message.text for message in told] == (["a"] if attack else ["a", "b"])
        assert engine.killed == bool(attack)

    asyncio.run(receive())


class Remote(EngineConnection):
    """Without an engine."""

    progress = pid = 0
    killed = False

    def kill(self) -> None:
        self.killed = True

    async def start(self) -> None: ...

    async def finish(self, patience: float) -> str:
        return ""


def exactly(connection: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size:
        got += connection.recv(size - len(got))
    return got
