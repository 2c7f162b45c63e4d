"""Times are those at which bytes arrived, however late they are read."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from bankfull.bench.load import stamped
from bankfull.bench.load.client import LoadClient, Outcome, RequestOptions
from bankfull.bench.load.connection import ClientConnection, Exchange
from bankfull.bench.load.stamped import KernelClock, StampedSocket
from tests.bench.load import kit
from tests.bench.load.kit import make_conversations

SECOND = 1_000_000_000
STANDSTILL = 0.2
UNKNOWN = 9999
"""An option number that no system has."""


@pytest.fixture
def stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that stalls right after sending its request."""
    start = ClientConnection.start

    def start_and_stop(connection: ClientConnection, exchange: Exchange) -> None:
        start(connection, exchange)
        time.sleep(STANDSTILL)

    monkeypatch.setattr(ClientConnection, "start", start_and_stop)


def ask() -> tuple[Outcome, kit.Account, float]:
    """A token that arrives while the client is stalled: the client's outcome, the kernel's record on the server's side,
    and when the request was due."""
    with kit.stamped(wait=0.02) as server:
        client = LoadClient(server, RequestOptions())
        one = client.run(make_conversations(1, 1), [0.0])[0]
        return one, kit.notes_of(server).accounts[one.text], client.begun + one.due


@pytest.mark.usefixtures("stands_still")
def test_a_stalled_client_knows_when_its_tokens_arrived() -> None:
    one, account, due = ask()
    assert one.stamped and one.ttft is not None
    assert account.written[0] < STANDSTILL - 0.05, "the server wrote meanwhile"
    assert one.ttft == pytest.approx(account.came + account.written[0] - due, abs=1e-3)
    assert one.e2e == one.ttft


@pytest.mark.usefixtures("stands_still")
def test_without_kernel_timestamps_times_are_those_of_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stamped, "SO_TIMESTAMPNS", UNKNOWN)
    one, _, _ = ask()
    assert one.error is None and not one.stamped
    assert one.ttft is not None and one.ttft >= STANDSTILL


@pytest.fixture
def ends() -> Iterator[tuple[StampedSocket, socket.socket]]:
    """One connection: the timestamping socket, and the server's."""
    with socket.create_server(("127.0.0.1", 0)) as listening, StampedSocket(socket.AF_INET, KernelClock()) as line:
        line.connect(listening.getsockname())
        server, _ = listening.accept()
        with server:
            until = time.monotonic() + 5
            while line.came is None:  # the kernel starts timestamping a little after the first request for it
                server.send(b"?")
                assert line.recv(1) == b"?" and time.monotonic() < until
            yield line, server


def test_a_read_without_a_stamp_does_not_keep_the_one_before(ends: tuple[StampedSocket, socket.socket]) -> None:
    line, server = ends
    begun = time.monotonic()
    server.send(b"x")
    assert line.recv(10) == b"x" and line.came is not None
    assert begun <= line.came <= time.monotonic()
    line.setsockopt(socket.SOL_SOCKET, stamped.SO_TIMESTAMPNS, 0)
    server.send(b"y")
    assert line.recv(10) == b"y" and line.came is None


def test_bytes_that_came_together_are_read_together(ends: tuple[StampedSocket, socket.socket]) -> None:
    line, server = ends
    for size in (1, 2, 3, 1000, 20_000):
        server.send(b"x" * size)
        time.sleep(0.002)
        assert line.recv(1 << 18) == b"x" * size


def test_an_answer_does_not_come_before_its_request_was_sent() -> None:
    """A client that stalls between sending and reading the clock notes a late send; the response's time corrects it."""

    class Wire(asyncio.Transport):
        def write(self, data: Any) -> None: ...

    class Line:
        came = 5.0

    class ConnectionPool:
        @staticmethod
        def clock() -> float:
            return 6.0

    exchange = Exchange(b"", 4.9, lambda ended: None)
    connection = ClientConnection(ConnectionPool(), Line())  # type: ignore[arg-type]
    connection.connection_made(Wire())
    connection.start(exchange)
    assert exchange.sent == 6.0
    connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nx")
    assert exchange.sent == 5.0 and exchange.parts == [(5.0, b"x")] and exchange.stamped


class Clocks:
    """The wall clock and the monotonic clock."""

    look = 10
    """Nanoseconds that a clock reading takes."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now, self.ahead = 100 * SECOND, 1_700_000_000 * SECOND
        patch.setattr(stamped, "monotonic_ns", self.monotonic)
        patch.setattr(stamped, "clock_gettime_ns", lambda which: self.monotonic() + self.ahead)

    def monotonic(self) -> int:
        self.now += self.look
        return self.now

    def stamp(self) -> int:
        """Timestamp of a packet that arrives now."""
        return self.now + self.ahead


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks(monkeypatch)


def test_a_stamp_becomes_a_moment_of_the_loops_clock(clocks: Clocks) -> None:
    kernel = KernelClock()
    for _ in range(3):
        arrived, stamp = clocks.now / 1e9, clocks.stamp()
        clocks.now += 50_000_000  # the reader stalled
        assert kernel.moment(stamp) == pytest.approx(arrived, abs=1e-6)


def test_impossible_timestamps_are_rejected(clocks: Clocks) -> None:
    early = clocks.stamp() - SECOND
    kernel = KernelClock()
    assert kernel.moment(early) is None, "from before the run"
    assert kernel.moment(clocks.stamp() + SECOND) is None, "from the future"


@pytest.mark.parametrize("step", [-3600 * SECOND, -3_000_000, -20_000, 20_000, 3_000_000, 3600 * SECOND])
def test_setting_the_wall_clock_does_not_change_times(clocks: Clocks, step: int) -> None:
    kernel = KernelClock()
    clocks.now += SECOND
    before = clocks.stamp()
    clocks.now += 1_000_000
    clocks.ahead += step
    for _ in range(3):
        assert kernel.moment(before) is None, "it would be off by the step"
        clocks.now += 2_000_000
    clocks.now += max(0, -step)
    arrived, after = clocks.now / 1e9, clocks.stamp()
    clocks.now += 1_000_000
    assert kernel.moment(after) == pytest.approx(arrived, abs=1e-6)


class Unread(StampedSocket):
    """Reads like Linux: across packets, with the timestamp of the last one touched."""

    def __init__(self, packets: list[tuple[int, bytes]]) -> None:
        super().__init__(socket.AF_INET, KernelClock())
        self.packets = packets

    def recvmsg(self, size: int, space: int = 0, flags: int = 0) -> Any:  # type: ignore[override]
        data, last, left = b"", 0, []
        for stamp, packet in self.packets:
            taken = packet[: size - len(data)]
            data += taken
            last = stamp if taken else last
            left.append((stamp, packet[len(taken) :]))
        if not flags & socket.MSG_PEEK:
            self.packets = [(stamp, packet) for stamp, packet in left if packet]
        notes = [(socket.SOL_SOCKET, stamped.SO_TIMESTAMPNS, stamped.STAMP.pack(*divmod(last, SECOND)))]
        return data, notes if data else [], 0, None


@pytest.mark.parametrize("sizes", [(1,), (1, 1), (5, 1, 300), (300, 5, 7, 1), (2, 1000, 2)])
def test_what_came_later_is_left_for_the_next_read(clocks: Clocks, sizes: tuple[int, ...]) -> None:
    with Unread([]) as line:
        came = []
        for number, size in enumerate(sizes):
            clocks.now += 10_000_000
            came.append((clocks.now / 1e9, bytes([number]) * size))
            line.packets.append((clocks.stamp(), came[-1][1]))
        clocks.now += 50_000_000  # the reader stalled
        for at, packet in came:
            assert line.recv(1 << 18) == packet
            assert line.came == pytest.approx(at, abs=1e-6)
        assert line.recv(1 << 18) == b"" and line.came is None


def test_a_reader_in_time_reads_everything_at_once(clocks: Clocks) -> None:
    with Unread([]) as line:
        line.packets = [(clocks.stamp(), b"head"), (clocks.stamp() + 50_000, b"body")]
        clocks.now += 60_000
        assert line.recv(1 << 18) == b"headbody"


def test_an_interruption_between_two_looks_is_not_taken_for_a_change(clocks: Clocks) -> None:
    kernel = KernelClock()
    arrived, stamp = clocks.now / 1e9, clocks.stamp()
    clocks.look = 40_000_000
    assert kernel.moment(stamp) == pytest.approx(arrived, abs=1e-6)
