"""The host of a rank: who may start the rank, how many there are, and with whom it ends."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Iterator

import pytest

import bankfull.handshake.proof
from bankfull.errors import ConfigError, RankLost
from bankfull.handshake import inherited
from bankfull.handshake.inherited import Secrets, handed
from bankfull.parallel import hosting
from bankfull.parallel.hosting import RankHost
from bankfull.parallel.reaching import HOSTS, RankHosts

SECRET = b"s" * 32
ECHO = """
import os, select, socket, sys
own = socket.socket(fileno=int(sys.argv[1]))
own.sendall(b"%d\\n" % os.getpid())
poll = select.poll()
poll.register(own, select.POLLRDHUP)
poll.register(0, 0)
poll.poll()
"""
"""In the place of a rank: it says who it is, and ends with its connection or its host."""


@pytest.fixture(autouse=True)
def echo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosting, "rank_command", lambda *files: [sys.executable, "-c", ECHO, *map(str, files)])


def hosted(work: Callable[[tuple[str, int]], None]) -> None:
    """Run `work` on a thread, with the address of a host."""

    async def run() -> None:
        host = RankHost(SECRET)
        try:
            await asyncio.to_thread(work, await host.start("127.0.0.1"))
        finally:
            await host.close()
        assert host.pid is None

    asyncio.run(run())


def reach(address: tuple[str, int], token: bytes = SECRET) -> socket.socket:
    [connection] = RankHosts((address,), token).connect(1)
    connection.settimeout(30.0)
    return connection


def test_a_host_runs_one_rank_and_the_last_engine_has_it() -> None:
    def work(address: tuple[str, int]) -> None:
        with reach(address) as first:
            assert first.recv(100).strip().isdigit()
            with reach(address) as second:
                assert second.recv(100).strip().isdigit()
                assert first.recv(1) == b"", "the rank of the engine before has ended"

    hosted(work)


def test_the_rank_ends_with_its_host() -> None:
    found: list[socket.socket] = []

    def work(address: tuple[str, int]) -> None:
        found.append(reach(address))
        assert found[0].recv(100)

    hosted(work)
    assert found[0].recv(1) == b""
    found[0].close()


def test_another_token_starts_nothing() -> None:
    def work(address: tuple[str, int]) -> None:
        with pytest.raises(ConfigError, match=r"^Rank 1 at 127\.0\.0\.1:\d+: .*another token"):
            reach(address, b"t" * 32)

    hosted(work)


def test_another_version_is_refused_before_anything_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(address: tuple[str, int]) -> None:
        versions = iter([b"0.0.8", b"0.0.9"])  # those that the two ends name
        monkeypatch.setattr(bankfull.handshake.proof, "own_version", lambda: next(versions, b"1.0"))
        with pytest.raises(ConfigError, match="different versions of bankfull"):
            reach(address)

    hosted(work)


def test_a_host_that_is_gone_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(RankLost, match=rf"^rank 1 cannot be reached at 127\.0\.0\.1:{port} \(Connection refused\)\.$"):
        reach(("127.0.0.1", port))


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.delenv(HOSTS, raising=False)
    yield monkeypatch


@pytest.mark.parametrize("addresses", [(), (("10.0.0.1", 7),), (("10.0.0.1", 7), ("fd00::2", 8))])
def test_hosts_travel_in_the_environment_and_their_token_does_not(
    clean: pytest.MonkeyPatch, addresses: tuple[tuple[str, int], ...]
) -> None:
    assert RankHosts.of_environment() is None, "then ranks are processes of this machine"
    hosts = RankHosts(addresses, SECRET)
    assert SECRET.hex() not in str(hosts.variables())
    with handed(Secrets(ranks=SECRET)) as file:
        clean.setattr(inherited, "INHERITED", Secrets())
        inherited.inherit(os.dup(file))
    for name, value in hosts.variables().items():
        clean.setenv(name, value)
    assert RankHosts.of_environment() == hosts


def test_ranks_without_a_place_are_not_started_here() -> None:
    with pytest.raises(RankLost, match="have no place yet"):
        RankHosts((), SECRET).connect(1)
    with pytest.raises(ConfigError, match="3 other ranks need a place, and 1 have one"):
        RankHosts((("127.0.0.1", 1),), SECRET).connect(3)
