"""State that goes to another engine's exchange over TCP: all of a page or nothing of it arrives, only from who knows
the secret, and every wait has a bound."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bankfull.state import page_listener, socket_carrier
from bankfull.state.disk import DamagedPlace
from bankfull.state.exchange import KINDS, ExchangeShape, MemoryCarrier
from bankfull.state.page_frames import (
    ACCEPTED,
    CLAIM,
    GREETING,
    HEAD_BYTES,
    MAC,
    MAGIC,
    NONCE,
    OTHER_FORM,
    REFUSED,
    VERDICT,
    WRITTEN,
    WRONG_SECRET,
    BrokenFrame,
    Frame,
    PageLine,
    claim,
    frame_of,
    verify,
)
from bankfull.state.page_listener import PageListener
from bankfull.state.socket_carrier import SocketCarrier
from tests.quick import examples

SHAPE = ExchangeShape(bytes(range(32)), pages=5, slots=3, page_bytes=96, slot_bytes=40)
SECRET = b"s" * 32
HOST = "127.0.0.1"
PAGE = bytes(range(96))


@pytest.fixture
def listener() -> Iterator[PageListener]:
    made = PageListener(SHAPE, HOST, SECRET)
    yield made
    made.close()


@contextmanager
def carrier(
    address: tuple[str, int], secret: bytes = SECRET, identity: bytes = SHAPE.identity
) -> Iterator[SocketCarrier]:
    made = SocketCarrier(secret, identity)
    made.locate(0, address)
    yield made
    made.close()


def soon() -> float:
    return time.monotonic() + 30


def read(listener: PageListener, kind: str, place: int, key: bytes) -> bytes:
    into = bytearray(SHAPE.place_bytes[kind])
    listener.files[kind].read(place, key, memoryview(into))
    return bytes(into)


def holds_nothing(listener: PageListener, place: int, key: bytes = b"name") -> bool:
    try:
        read(listener, "pages", place, key)
    except DamagedPlace:
        return True
    return False


@contextmanager
def raw(listener: PageListener) -> Iterator[tuple[PageLine, socket.socket]]:
    """A sender that has proven itself, and sends what it likes."""
    connection = socket.create_connection(listener.address)
    line = PageLine(connection)
    claim(line, SECRET, SHAPE.identity, soon())
    yield line, connection
    line.close()


def until(what: Callable[[], bool]) -> None:
    ends = soon()
    while not what():
        assert time.monotonic() < ends, "it never happens"
        time.sleep(0.002)


# -- what arrives


@given(
    st.lists(
        st.tuples(st.sampled_from(KINDS), st.integers(1, 3), st.binary(max_size=47), st.integers(0, 255)), max_size=8
    )
)
@examples(50)
def test_an_exchange_has_the_same_bytes_over_a_socket_as_in_shared_memory(
    writes: list[tuple[str, int, bytes, int]],
) -> None:
    listener, other = PageListener(SHAPE, HOST, SECRET), PageListener(SHAPE, HOST, SECRET)
    try:
        files = [one._reader._file for one in (listener, other)]
        with carrier(listener.address) as sockets:
            for kind, place, key, byte in writes:
                content = memoryview(bytes([byte]) * SHAPE.place_bytes[kind])
                sockets.carry(0, kind, place, key, content)
                MemoryCarrier(files[1:], SHAPE.identity).carry(0, kind, place, key, content)
                assert read(listener, kind, place, key) == content
        assert os.pread(files[0], SHAPE.nbytes, 0) == os.pread(files[1], SHAPE.nbytes, 0)
    finally:
        listener.close()
        other.close()


def test_pages_from_several_threads_each_arrive_in_their_place(listener: PageListener) -> None:
    with carrier(listener.address) as sockets:

        def send(place: int) -> None:
            for _ in range(20):
                sockets.carry(0, "pages", place, b"%d" % place, memoryview(bytes([place]) * 96))

        threads = [threading.Thread(target=send, args=(place,)) for place in range(1, 6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        for place in range(1, 6):
            assert read(listener, "pages", place, b"%d" % place) == bytes([place]) * 96


def test_a_page_larger_than_the_buffers_of_a_socket_arrives_whole() -> None:
    shape = ExchangeShape(bytes(32), pages=1, slots=0, page_bytes=24 << 20, slot_bytes=0)
    content = os.urandom(1 << 10) * (24 << 10)
    listener = PageListener(shape, HOST, SECRET)
    with carrier(listener.address, identity=shape.identity) as sockets:
        sockets.carry(0, "pages", 1, b"name", memoryview(content))
        into = bytearray(len(content))
        listener.files["pages"].read(1, b"name", memoryview(into))
        assert into == content
    listener.close()


def test_a_sender_of_a_place_that_does_not_exist_is_cut_off(listener: PageListener) -> None:
    with carrier(listener.address) as sockets, pytest.raises(DamagedPlace, match="closed the connection"):
        sockets.carry(0, "pages", 6, b"name", memoryview(PAGE))


def test_an_engine_whose_address_is_unknown_gets_nothing() -> None:
    with pytest.raises(DamagedPlace, match="is not known"):
        SocketCarrier(SECRET, SHAPE.identity).carry(3, "pages", 1, b"name", memoryview(PAGE))


# -- frames


FRAME = Frame("pages", 2, 96, zlib.crc32(PAGE), b"name")


def test_a_frame_is_read_as_it_was_written() -> None:
    assert frame_of(FRAME.head(), SHAPE) == FRAME


@given(st.integers(0, 8 * HEAD_BYTES - 1))
@examples(100)
def test_a_head_with_a_flipped_bit_is_no_frame(bit: int) -> None:
    head = bytearray(FRAME.head())
    head[bit // 8] ^= 1 << bit % 8
    with pytest.raises(BrokenFrame):
        frame_of(bytes(head), SHAPE)


@pytest.mark.parametrize(
    "frame",
    [
        Frame("pages", 0, 96, 0, b""),
        Frame("pages", 6, 96, 0, b""),
        Frame("slots", 4, 40, 0, b""),
        Frame("pages", 1, 97, 0, b""),
        Frame("slots", 1, 96, 0, b""),
        Frame("pages", 1, 1 << 60, 0, b""),
    ],
)
def test_a_frame_for_no_place_of_the_exchange_is_refused_before_its_content_is_read(frame: Frame) -> None:
    with pytest.raises(BrokenFrame, match="no place"):
        frame_of(frame.head(), SHAPE)


def test_content_that_was_damaged_on_the_way_is_not_kept_and_the_connection_goes_on(listener: PageListener) -> None:
    with raw(listener) as (line, _):
        line.send(FRAME.head(), bytes(96), ends=soon())
        assert line.receive(1, soon()) == REFUSED
        assert holds_nothing(listener, 2)
        line.send(FRAME.head(), PAGE, ends=soon())
        assert line.receive(1, soon()) == WRITTEN
    assert read(listener, "pages", 2, b"name") == PAGE


@pytest.mark.parametrize("sent", [1, HEAD_BYTES - 1, HEAD_BYTES, HEAD_BYTES + 95])
def test_a_sender_that_dies_in_the_middle_of_a_page_changes_nothing(listener: PageListener, sent: int) -> None:
    with carrier(listener.address) as sockets:
        sockets.carry(0, "pages", 2, b"name", memoryview(bytes(96)))
        before = os.pread(listener._reader._file, SHAPE.nbytes, 0)
        with raw(listener) as (line, _):
            line.send((FRAME.head() + PAGE)[:sent], ends=soon())
        until(lambda: len(listener._lines) == 1)
        assert os.pread(listener._reader._file, SHAPE.nbytes, 0) == before
        sockets.carry(0, "pages", 2, b"name", memoryview(PAGE))  # others go on


def test_a_sender_that_stops_in_the_middle_of_a_page_is_cut_off(
    listener: PageListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_listener, "PAGE_SECONDS", 0.05)
    with raw(listener) as (line, connection):
        line.send(FRAME.head(), PAGE[:50], ends=soon())
        connection.settimeout(30)
        assert connection.recv(1) == b"", "the listener has closed it"
    assert holds_nothing(listener, 2)


def test_a_broken_frame_ends_the_connection_and_no_other(listener: PageListener) -> None:
    with carrier(listener.address) as sockets:
        sockets.carry(0, "pages", 1, b"a", memoryview(PAGE))
        with raw(listener) as (line, connection):
            line.send(bytes(HEAD_BYTES), ends=soon())
            connection.settimeout(30)
            assert connection.recv(1) == b""
        sockets.carry(0, "pages", 2, b"b", memoryview(PAGE))


# -- who may send


def test_a_sender_with_another_secret_writes_nothing(listener: PageListener) -> None:
    with carrier(listener.address, secret=b"x" * 32) as sockets, pytest.raises(DamagedPlace, match="another secret"):
        sockets.carry(0, "pages", 2, b"name", memoryview(PAGE))
    assert holds_nothing(listener, 2)


def test_a_receiver_without_the_secret_gets_no_page() -> None:
    """A process that has taken over the port accepts everyone: it cannot prove that it knows the secret."""
    got: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def pretend(connection: socket.socket) -> None:
        line = PageLine(connection)
        line.send(GREETING.pack(MAGIC, bytes(NONCE)), ends=soon())
        line.receive(CLAIM.size, soon())
        line.send(VERDICT.pack(ACCEPTED, bytes(MAC)), ends=soon())
        connection.settimeout(30)
        got.put(connection.recv(1))

    with pretending(pretend) as address:
        with carrier(address) as sockets, pytest.raises(DamagedPlace, match="another secret"):
            sockets.carry(0, "pages", 2, b"name", memoryview(PAGE))
        assert got.get(timeout=30) == b""


def test_the_secret_never_passes_over_the_connection() -> None:
    a, b = socket.socketpair()
    passed: list[bytes] = []

    class Watched(PageLine):
        def __init__(self, connection: socket.socket) -> None:
            self._connection = connection

        def send(self, *parts: bytes | memoryview, ends: float) -> None:
            passed.extend(bytes(part) for part in parts)
            super().send(*parts, ends=ends)

    receiving = threading.Thread(target=verify, args=(Watched(a), SECRET, SHAPE.identity, soon()))
    receiving.start()
    claim(Watched(b), SECRET, SHAPE.identity, soon())
    receiving.join(30)
    assert passed and not any(SECRET[:8] in part for part in passed)
    a.close()
    b.close()


@pytest.mark.parametrize(
    ("secret", "identity", "outcome"), [(b"x", b"i" * 32, WRONG_SECRET), (b"s", b"j" * 32, OTHER_FORM)]
)
def test_a_verdict_names_what_differs(secret: bytes, identity: bytes, outcome: bytes) -> None:
    a, b = (PageLineOver(end) for end in socket.socketpair())
    found: list[bool] = []
    receiving = threading.Thread(target=lambda: found.append(verify(a, b"s", b"i" * 32, soon())))
    receiving.start()
    said = "another secret" if outcome == WRONG_SECRET else "another form"
    with pytest.raises(DamagedPlace, match=said):
        claim(b, secret, identity, soon())
    receiving.join(30)
    assert found == [False]
    a.close()
    b.close()


class PageLineOver(PageLine):
    """Over a pair of sockets, which has no options of TCP."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection


def test_connections_that_prove_nothing_are_few_and_do_not_stay(
    listener: PageListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_listener, "CONNECT_SECONDS", 0.2)
    silent = [socket.create_connection(listener.address) for _ in range(page_listener.MOST_UNKNOWN + 4)]
    until(lambda: not listener._lines)
    for connection in silent:
        connection.settimeout(30)
        while connection.recv(256):
            pass  # the greeting, then the end
        connection.close()
    monkeypatch.undo()
    with carrier(listener.address) as sockets:
        sockets.carry(0, "pages", 2, b"name", memoryview(PAGE))


# -- bounds


@contextmanager
def pretending(serve: Callable[[socket.socket], None]) -> Iterator[tuple[str, int]]:
    """A process that behaves as the test wants."""
    server = socket.create_server((HOST, 0))
    ends: list[socket.socket] = []

    def accept() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            ends.append(connection)
            with suppress(OSError):
                serve(connection)

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    yield server.getsockname()[:2]
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    for one in ends:
        one.close()
    thread.join(30)


def known_then_deaf(connection: socket.socket) -> None:
    """Proves itself, and reads nothing."""
    verify(PageLine(connection), SECRET, SHAPE.identity, soon())


def test_a_receiver_that_reads_nothing_is_given_up_in_time_and_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_carrier, "PAGE_SECONDS", 0.05)
    monkeypatch.setattr(socket_carrier, "REST_SECONDS", 3600.0)
    with pretending(known_then_deaf) as address, carrier(address) as sockets:
        with pytest.raises(DamagedPlace, match="no answer in time"):
            sockets.carry(0, "pages", 1, b"name", memoryview(bytes(24 << 20)))
        with pytest.raises(DamagedPlace, match="a moment ago"):
            sockets.carry(0, "pages", 1, b"name", memoryview(PAGE))


def known_then_dripping(connection: socket.socket) -> None:
    """Proves itself, and reads a little now and then."""
    known_then_deaf(connection)
    while connection.recv(64):
        time.sleep(0.005)


def test_a_receiver_that_reads_slowly_is_given_up_although_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_carrier, "PAGE_SECONDS", 0.1)
    timeout = pytest.raises(DamagedPlace, match="no answer in time")
    with pretending(known_then_dripping) as address, carrier(address) as sockets, timeout:
        sockets.carry(0, "pages", 1, b"name", memoryview(bytes(24 << 20)))


def test_a_receiver_that_never_greets_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_carrier, "CONNECT_SECONDS", 0.05)
    with (
        pretending(lambda connection: None) as address,
        carrier(address) as sockets,
        pytest.raises(DamagedPlace, match="no answer in time"),
    ):
        sockets.carry(0, "pages", 1, b"name", memoryview(PAGE))


def test_a_process_that_is_none_of_ours_gets_no_claim() -> None:
    def greet(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n".ljust(GREETING.size))

    with (
        pretending(greet) as address,
        carrier(address) as sockets,
        pytest.raises(DamagedPlace, match=r"not one of bankfull's"),
    ):
        sockets.carry(0, "pages", 1, b"name", memoryview(PAGE))


def test_an_engine_that_was_started_again_is_found_at_its_new_address(
    listener: PageListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_carrier, "REST_SECONDS", 3600.0)
    before = PageListener(SHAPE, HOST, SECRET)
    with carrier(before.address) as sockets:
        sockets.carry(0, "pages", 1, b"name", memoryview(PAGE))
        before.close()
        with pytest.raises(DamagedPlace, match="gets no state"):
            sockets.carry(0, "pages", 1, b"name", memoryview(PAGE))
        sockets.locate(0, listener.address)
        sockets.carry(0, "pages", 1, b"name", memoryview(PAGE))
    assert read(listener, "pages", 1, b"name") == PAGE


def test_a_connection_that_the_receiver_has_closed_meanwhile_is_opened_again(listener: PageListener) -> None:
    with carrier(listener.address) as sockets:
        sockets.carry(0, "pages", 1, b"name", memoryview(PAGE))
        for line in list(listener._lines):
            line.close()
        until(lambda: not listener._lines)
        sockets.carry(0, "pages", 2, b"other", memoryview(PAGE))
    assert read(listener, "pages", 2, b"other") == PAGE


def test_closing_ends_every_thread_and_socket() -> None:
    def files() -> int:
        return len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0

    before, threads = files(), threading.active_count()
    listener = PageListener(SHAPE, HOST, SECRET)
    with carrier(listener.address) as sockets:
        sockets.carry(0, "pages", 1, b"name", memoryview(PAGE))
        stuck = socket.create_connection(listener.address)
        until(lambda: len(listener._lines) == 2)
        listener.close()
        stuck.close()
    until(lambda: threading.active_count() <= threads)
    assert files() <= before
