"""Listeners between the processes of a server serve who knows the token, whoever else connects.

An attacker's connections never time out here, so that an honest caller that gets through has not waited for that."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from typing import Any

import pytest

from bankfull.handshake import calling, listener, waiting
from bankfull.handshake.calling import exactly, reach
from bankfull.handshake.listener import HandshakeListener, reply
from bankfull.handshake.proof import (
    ACCEPTED,
    CONTROL,
    GREETING,
    HELLO,
    MAC,
    NONCE,
    RANK,
    REPLY,
    SUBJECT,
    WRONG_TOKEN,
    CallerSide,
    Wanted,
)
from bankfull.handshake.waiting import MOST_CLAIMING, MOST_OF_ADDRESS, MOST_SILENT, WaitingRoom, peer_of
from bankfull.parallel.hosting import RankHost
from bankfull.serve.engine.gateway import Gateway
from bankfull.state.exchange import ExchangeShape
from bankfull.state.page_listener import PageListener
from bankfull.state.socket_carrier import SocketCarrier

TOKEN = b"t" * 32
HOST = "127.0.0.1"
SILENT = 24
"""Connections that once locked everybody out."""
HONEST = 12
SHAPE = ExchangeShape(bytes(range(32)), pages=HONEST, slots=0, page_bytes=96, slot_bytes=0)


class Counting(HandshakeListener):
    """Accepts whoever has a proof."""

    def __init__(self) -> None:
        super().__init__(TOKEN)
        self.served = 0

    async def serve(self, connection: socket.socket, wanted: Wanted) -> None:
        self.served += 1
        await reply(connection, ACCEPTED, wanted.proof)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_SECONDS", 3600.0)
    monkeypatch.setattr(calling, "HANDSHAKE_SECONDS", 30.0)


@pytest.fixture
def attacker() -> Iterator[Attacker]:
    with Attacker() as made:
        yield made


class Attacker:
    """Somebody on this machine without the token. Holds what it has opened, and ends all of it."""

    def __init__(self) -> None:
        self.held: list[socket.socket] = []
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Attacker:
        return self

    def __exit__(self, *how: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)
        for connection in self.held:
            connection.close()

    def open(self, address: tuple[str, int], first: bytes = b"", source: str = HOST) -> None:
        connection = socket.create_connection(address, 30, (source, 0))
        self.held.append(connection)
        with suppress(OSError):
            connection.sendall(first)

    def silent(self, address: tuple[str, int]) -> None:
        for _ in range(SILENT):
            self.open(address)

    def from_many_addresses(self, address: tuple[str, int]) -> None:
        for number in range(2 * MOST_SILENT):
            self.open(address, source=f"127.0.{1 + number // 250}.{1 + number % 250}")

    def slow(self, address: tuple[str, int]) -> None:
        """A byte now and then, on each of many connections, while the others call."""
        for _ in range(2 * MOST_OF_ADDRESS):
            self.open(address)

        def drip() -> None:
            while not self._stop.wait(0.002):
                for connection in list(self.held):
                    with suppress(OSError):
                        connection.send(b"b")

        self._begin(drip)

    def wrong_first_message(self, address: tuple[str, int]) -> None:
        for _ in range(2 * MOST_OF_ADDRESS):
            self.open(address, CallerSide(b"x" * 32, CONTROL, bytes(SUBJECT)).hello)

    def half_closed(self, address: tuple[str, int]) -> None:
        for _ in range(SILENT):
            self.open(address, b"half")
            self.held[-1].shutdown(socket.SHUT_WR)

    def flood(self, address: tuple[str, int]) -> None:
        """New silent connections all the time: 3,000 at most."""

        def pour() -> None:
            for number in range(3000):
                if self._stop.is_set():
                    return
                with suppress(OSError):
                    self.open(address, source=f"127.0.0.{1 + number % 2}")

        self._begin(pour)

    def _begin(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        self._threads.append(thread)
        thread.start()


ATTACKS = [
    Attacker.silent,
    Attacker.from_many_addresses,
    Attacker.slow,
    Attacker.wrong_first_message,
    Attacker.half_closed,
    Attacker.flood,
]
attacks = pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
Attack = Callable[[Attacker, tuple[str, int]], None]


@attacks
def test_honest_callers_reach_a_listener_that_is_attacked(attack: Attack, attacker: Attacker) -> None:
    async def knock() -> None:
        made = Counting()
        address = await made.start(HOST)
        try:
            await asyncio.to_thread(attack, attacker, address)
            for _ in range(HONEST):
                connection, _ = await reach(address, TOKEN, CONTROL, bytes(SUBJECT))
                connection.close()
            assert made.served == HONEST
            assert made.waiting <= MOST_SILENT
        finally:
            await made.close()

    run(knock())


@pytest.mark.parametrize("kind", ["gateway", "host of a rank"])
def test_silent_connections_lock_nobody_out(kind: str, attacker: Attacker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the listeners is one of these; a purpose that they do not know starts no process."""

    async def knock() -> None:
        made = Gateway(TOKEN) if kind == "gateway" else RankHost(TOKEN)
        served: list[bytes] = []

        async def serve(connection: socket.socket, wanted: Wanted) -> None:
            served.append(wanted.purpose)
            await reply(connection, ACCEPTED, wanted.proof)

        monkeypatch.setattr(made, "serve", serve)
        address = await made.start(HOST)
        try:
            await asyncio.to_thread(attacker.silent, address)
            for _ in range(HONEST):
                (await reach(address, TOKEN, RANK, bytes(SUBJECT)))[0].close()
            assert len(served) == HONEST
        finally:
            await made.close()

    run(knock())


@attacks
def test_pages_arrive_at_a_listener_that_is_attacked(attack: Attack, attacker: Attacker) -> None:
    made = PageListener(SHAPE, HOST, TOKEN)
    threads = threading.active_count()
    try:
        attack(attacker, made.address)
        for place in range(1, 1 + HONEST):  # a connection for each
            sockets = SocketCarrier(TOKEN, SHAPE.identity)
            sockets.locate(0, made.address)
            sockets.carry(0, "pages", place, b"name", memoryview(bytes(96)))
            sockets.close()
        assert threading.active_count() <= threads + HONEST + len(attacker._threads), "attackers cost no threads"
    finally:
        made.close()


def test_an_attack_is_bounded_in_connections_and_in_lines_of_the_log(
    attacker: Attacker, caplog: pytest.LogCaptureFixture
) -> None:
    def sockets() -> int:
        return sum(
            os.readlink(f"/proc/self/fd/{name}").startswith("socket")
            for name in os.listdir("/proc/self/fd")
            if os.path.islink(f"/proc/self/fd/{name}")
        )

    async def knock() -> None:
        made = Counting()
        address = await made.start(HOST)
        before = sockets()
        for attack in (attacker.from_many_addresses, attacker.wrong_first_message):
            await asyncio.to_thread(attack, address)
        await until(lambda: made._refused > 0)
        assert made.waiting <= MOST_SILENT
        assert sockets() - before - len(attacker.held) <= MOST_SILENT
        assert len([record for record in caplog.records if "has refused" in record.message]) == 1
        await made.close()
        assert made.waiting == 0

    with caplog.at_level(logging.WARNING):
        run(knock())
    assert "The listener has refused 1 connections" in caplog.text


def test_a_silent_caller_is_let_go_in_time(attacker: Attacker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_SECONDS", 0.05)

    async def wait() -> None:
        made = Counting()
        address = await made.start(HOST)
        await asyncio.to_thread(attacker.silent, address)
        await until(lambda: made.waiting > 0)
        await until(lambda: made.waiting == 0)
        await made.close()

    run(wait())


# -- what the first message proves, and what it does not


def test_a_recorded_first_message_proves_nothing_and_takes_one_place() -> None:
    async def replay() -> None:
        made = Counting()
        address = await made.start(HOST)
        recorded = CallerSide(TOKEN, CONTROL, bytes(SUBJECT)).hello
        for number in range(3):
            with socket.socket() as connection:
                connection.setblocking(False)
                await asyncio.get_running_loop().sock_connect(connection, address)
                await asyncio.get_running_loop().sock_sendall(connection, recorded)
                await exactly(connection, GREETING.size)
                if number:
                    assert await ended(connection), "the nonce was used before"
                else:
                    await asyncio.get_running_loop().sock_sendall(connection, bytes(MAC))
                    assert await exactly(connection, REPLY.size) == REPLY.pack(WRONG_TOKEN, bytes(MAC))
        assert made.served == 0
        await made.close()

    run(replay())


def test_both_ends_have_the_same_keys_and_no_two_connections_share_any() -> None:
    kept: list[Wanted] = []

    class Keeping(Counting):
        async def serve(self, connection: socket.socket, wanted: Wanted) -> None:
            kept.append(wanted)
            await super().serve(connection, wanted)

    async def knock() -> None:
        made = Keeping()
        address = await made.start(HOST)
        found = []
        for _ in range(2):
            connection, keys = await reach(address, TOKEN, CONTROL, bytes(SUBJECT))
            connection.close()
            found.append(keys)
        assert found == [wanted.keys for wanted in kept]
        values = [key for keys in found for key in (keys.of_caller, keys.of_listener)]
        assert len({*values, TOKEN}) == 5
        await made.close()

    run(knock())


def test_a_first_message_is_a_packet_with_a_nonce_of_its_own() -> None:
    first, second = (CallerSide(TOKEN, CONTROL, bytes(SUBJECT)).hello for _ in range(2))
    assert len(first) == HELLO.size < 500 and first != second and TOKEN not in first
    assert first[-MAC - NONCE : -MAC] != second[-MAC - NONCE : -MAC]


# -- the waiting room


class One:
    def __init__(self, address: str) -> None:
        self.address = address


def test_a_new_connection_always_enters_and_the_oldest_of_the_greediest_address_leaves() -> None:
    room: WaitingRoom[One] = WaitingRoom()
    honest = One("10.0.0.1")
    assert room.enter(honest) is None
    greedy = [One("10.0.0.2") for _ in range(2 * MOST_OF_ADDRESS)]
    assert [room.enter(one) for one in greedy] == [None] * MOST_OF_ADDRESS + greedy[:MOST_OF_ADDRESS]
    many = [One(f"10.0.1.{number}") for number in range(MOST_SILENT - 2)]
    gone = [left for one in many if (left := room.enter(one)) is not None]
    assert honest in room and len(room) == MOST_SILENT
    assert all(one.address == "10.0.0.2" for one in gone), "until each address has one"
    assert room.enter(One("10.0.2.1")) in (honest, *greedy), "then the oldest one leaves"


def test_silent_connections_take_no_place_of_those_that_claim_to_know_the_token() -> None:
    room: WaitingRoom[One] = WaitingRoom()
    claiming = [One("10.0.0.1") for _ in range(MOST_CLAIMING)]
    for number, one in enumerate(claiming):
        room.enter(one)
        assert room.claim(one, b"%d" % number) is None
    for number in range(3 * MOST_SILENT):
        room.enter(One(f"10.1.{number}.1"))
    assert all(one in list(room) for one in claiming)
    one_more = One("10.0.0.1")
    room.enter(one_more)
    assert room.claim(one_more, b"one more") is claiming[0]
    assert len(room._nonces) <= waiting.MOST_NONCES


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("fd00::1", "fd00::2", True),
        ("fd00:0:0:1::1", "fd00:0:0:2::1", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("fe80::1%eth0", "fe80::2%eth0", True),
    ],
)
def test_a_network_of_ipv6_is_one_peer(one: str, other: str, same: bool) -> None:
    assert (peer_of(one) == peer_of(other)) is same


# -- the end


def test_a_connection_in_the_moment_of_the_end_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A future that was cancelled got a result: InvalidStateError, in the log of whoever ran the loop."""
    problems: list[dict[str, Any]] = []

    async def end() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
        made = Gateway(TOKEN)
        address = await made.start(HOST)
        with socket.create_connection(address):
            await asyncio.sleep(0)  # the loop learns of the connection behind this task
            await made.close()
            await asyncio.sleep(0.01)

    run(end())
    gc.collect()
    assert not problems


async def ended(connection: socket.socket) -> bool:
    with suppress(ConnectionError):
        while await asyncio.get_running_loop().sock_recv(connection, 4096):
            pass
    return True


async def until(what: Callable[[], bool]) -> None:
    ends = time.monotonic() + 30
    while not what():
        assert time.monotonic() < ends, "it never happens"
        await asyncio.sleep(0.002)
