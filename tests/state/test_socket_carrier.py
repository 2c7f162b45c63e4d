"""State that goes to another engine's exchange over TCP: all of a page or nothing of it arrives, only from who knows
the secret, and every wait has a bound."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bankfull.handshake import listener as listener_module
from bankfull.handshake.proof import ACCEPTED, GREETING, HELLO, MAC, PROOF, REPLY, TAG, ListenerSide, Seal, Wanted
from bankfull.state import page_listener, socket_carrier
from bankfull.state.disk import DamagedPlace
from bankfull.state.exchange import KINDS, ExchangeShape, MemoryCarrier
from bankfull.state.page_frames import FRAME, WRITTEN, BrokenFrame, Frame, PageLine, SealedLine, claim, frame_of
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
def raw(listener: PageListener) -> Iterator[tuple[SealedLine, socket.socket]]:
    """A sender that has proven itself, and sends what it likes."""
    connection = socket.create_connection(listener.address)
    line = claim(PageLine(connection), SECRET, SHAPE.identity, soon())
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


PLACED = Frame("pages", 2, 96, b"name")


def test_a_frame_is_read_as_it_was_written() -> None:
    assert frame_of(PLACED.head(), SHAPE) == PLACED


@pytest.mark.parametrize(
    "frame",
    [
        Frame("pages", 0, 96, b""),
        Frame("pages", 6, 96, b""),
        Frame("slots", 4, 40, b""),
        Frame("pages", 1, 97, b""),
        Frame("slots", 1, 96, b""),
        Frame("pages", 1, 1 << 60, b""),
    ],
)
def test_a_frame_for_no_place_of_the_exchange_is_refused_before_its_content_is_read(frame: Frame) -> None:
    with pytest.raises(BrokenFrame, match="no place"):
        frame_of(frame.head(), SHAPE)


WIRE = FRAME.size + TAG + len(PAGE) + TAG
"""Bytes of a page on its way."""


class Recorded:
    """What a sender has said on one connection, for somebody in the middle."""

    def __init__(self, line: SealedLine, connection: socket.socket) -> None:
        self._line, self._connection = line, connection
        self._own: Seal = line._own

    def page(self, content: bytes = PAGE, frame: Frame = PLACED) -> bytes:
        head = frame.head()
        return head + self._own.tag(head) + content + self._own.tag(content)

    def pass_on(self, what: bytes) -> bytes:
        """The answer; empty: the listener has closed the connection."""
        self._connection.settimeout(30)
        try:
            self._connection.sendall(what)
            if not (answer := self._connection.recv(1)):
                return b""
            assert self._line._theirs.opens(self._connection.recv(TAG, socket.MSG_WAITALL), answer)
            return answer
        except ConnectionError:
            return b""


@given(st.integers(0, 8 * WIRE - 1))
@examples(50)
def test_a_page_with_a_flipped_bit_is_not_kept_and_its_connection_ends(bit: int) -> None:
    listener = PageListener(SHAPE, HOST, SECRET)
    try:
        with raw(listener) as (line, connection):
            middle = Recorded(line, connection)
            page = bytearray(middle.page())
            page[bit // 8] ^= 1 << bit % 8
            assert middle.pass_on(bytes(page)) == b""
            assert holds_nothing(listener, 2)
    finally:
        listener.close()


@pytest.mark.parametrize("how", ["repeated", "reordered", "left out", "from another connection"])
def test_a_page_out_of_its_order_is_not_kept(how: str, listener: PageListener) -> None:
    with raw(listener) as (line, connection):
        middle = Recorded(line, connection)
        old = middle.page(bytes(96))
        assert middle.pass_on(old) == WRITTEN
        first, second = middle.page(), middle.page(bytes(96))
        if how == "from another connection":
            with raw(listener) as (other, over):
                assert Recorded(other, over).pass_on(old) == b""
            assert middle.pass_on(first) == WRITTEN
            return
        if how == "repeated":
            assert middle.pass_on(first) == WRITTEN
        assert middle.pass_on({"repeated": old, "reordered": second, "left out": second}[how]) == b""
    assert (read(listener, "pages", 2, b"name") == PAGE) is (how == "repeated")


def test_an_answer_that_the_receiver_has_not_given_is_not_believed() -> None:
    """Somebody in the middle takes a page and says that it was written."""

    def lie(connection: socket.socket) -> None:
        known_then_deaf(connection)
        connection.recv(WIRE, socket.MSG_WAITALL)
        connection.sendall(WRITTEN + bytes(TAG))

    refused = pytest.raises(DamagedPlace, match="is not what the other engine has sent")
    with pretending(lie) as address, carrier(address) as sockets, refused:
        sockets.carry(0, "pages", 2, b"name", memoryview(PAGE))


@pytest.mark.parametrize("sent", [1, FRAME.size, FRAME.size + TAG, WIRE - TAG, WIRE - 1])
def test_a_sender_that_dies_in_the_middle_of_a_page_changes_nothing(listener: PageListener, sent: int) -> None:
    with carrier(listener.address) as sockets:
        sockets.carry(0, "pages", 2, b"name", memoryview(bytes(96)))
        before = os.pread(listener._reader._file, SHAPE.nbytes, 0)
        with raw(listener) as (line, connection):
            connection.sendall(Recorded(line, connection).page()[:sent])
        until(lambda: len(listener._lines) == 1)
        assert os.pread(listener._reader._file, SHAPE.nbytes, 0) == before
        sockets.carry(0, "pages", 2, b"name", memoryview(PAGE))  # others go on


def test_a_sender_that_stops_in_the_middle_of_a_page_is_cut_off(
    listener: PageListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_listener, "PAGE_SECONDS", 0.05)
    with raw(listener) as (line, connection):
        connection.settimeout(30)
        connection.sendall(Recorded(line, connection).page()[:150])
        assert connection.recv(1) == b"", "the listener has closed it"
    assert holds_nothing(listener, 2)


def test_a_broken_frame_ends_the_connection_and_no_other(listener: PageListener) -> None:
    with carrier(listener.address) as sockets:
        sockets.carry(0, "pages", 1, b"a", memoryview(PAGE))
        with raw(listener) as (line, connection):
            line.send(bytes(FRAME.size), ends=soon())
            connection.settimeout(30)
            assert connection.recv(1) == b""
        sockets.carry(0, "pages", 2, b"b", memoryview(PAGE))


# -- who may send


def test_a_sender_with_another_secret_writes_nothing(listener: PageListener) -> None:
    with carrier(listener.address, secret=b"x" * 32) as sockets, pytest.raises(DamagedPlace, match="another token"):
        sockets.carry(0, "pages", 2, b"name", memoryview(PAGE))
    assert holds_nothing(listener, 2)


def test_a_receiver_without_the_secret_gets_no_page() -> None:
    """A process that has taken over the port accepts everyone: it cannot prove that it knows the secret."""
    got: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def pretend(connection: socket.socket) -> None:
        line = PageLine(connection)
        line.send(ListenerSide(b"x" * 32).greeting, ends=soon())
        line.receive(HELLO.size + PROOF.size, soon())
        line.send(REPLY.pack(ACCEPTED, bytes(MAC)), ends=soon())
        connection.settimeout(30)
        got.put(connection.recv(1))

    with pretending(pretend) as address:
        with carrier(address) as sockets, pytest.raises(DamagedPlace, match="could not prove"):
            sockets.carry(0, "pages", 2, b"name", memoryview(PAGE))
        assert got.get(timeout=30) == b""


def test_neither_the_secret_nor_a_key_passes_over_the_connection(listener: PageListener) -> None:
    passed: list[bytes] = []

    class Watched(PageLine):
        def send(self, *parts: bytes | memoryview, ends: float) -> None:
            passed.extend(bytes(part) for part in parts)
            super().send(*parts, ends=ends)

        def receive_into(self, into: memoryview, ends: float) -> None:
            super().receive_into(into, ends)
            passed.append(bytes(into))

    line = claim(Watched(socket.create_connection(listener.address)), SECRET, SHAPE.identity, soon())
    line.send(PLACED.head(), PAGE, ends=soon())
    assert line.receive(1, soon()) == WRITTEN
    secrets = [SECRET, line._own._key, line._theirs._key]
    said = b"".join(passed)
    assert len(said) > WIRE and not any(secret[:8] in said for secret in secrets)
    line.close()


def test_a_sender_with_state_of_another_form_is_told_so(listener: PageListener) -> None:
    refused = pytest.raises(DamagedPlace, match="another form")
    with carrier(listener.address, identity=b"j" * 32) as sockets, refused:
        sockets.carry(0, "pages", 2, b"name", memoryview(PAGE))
    assert holds_nothing(listener, 2)


def test_connections_that_prove_nothing_do_not_stay(listener: PageListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "HANDSHAKE_SECONDS", 0.05)
    for _ in range(4):
        with socket.create_connection(listener.address, 30) as connection:
            while connection.recv(256):
                pass  # the greeting, then the end
    assert not listener._lines


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
    line, answerer = PageLine(connection), ListenerSide(SECRET)
    line.send(answerer.greeting, ends=soon())
    assert answerer.take_hello(line.receive(HELLO.size, soon()))
    wanted = answerer.take_proof(line.receive(PROOF.size, soon()))
    assert isinstance(wanted, Wanted)
    line.send(REPLY.pack(ACCEPTED, wanted.proof), ends=soon())


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
        stuck.recv(1)  # it is greeted
        listener.close()
        stuck.close()
    until(lambda: threading.active_count() <= threads)
    assert files() <= before
