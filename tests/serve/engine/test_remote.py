"""An engine behind a gateway is supervised like a child process, and only its own cluster reaches it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

import bankfull
from bankfull import SamplingParams
from bankfull.errors import ModelError
from bankfull.handshake import listener as listener_module
from bankfull.handshake import proof as proof_module
from bankfull.handshake.calling import call, exactly
from bankfull.handshake.listener import reply
from bankfull.handshake.proof import (
    ACCEPTED,
    CONTROL,
    ENGINE,
    GREETING,
    HELLO,
    MAC,
    MAGIC,
    NONCE,
    PROTOCOL,
    REPLY,
    WRONG_VERSION,
    CallerSide,
    HandshakeRefused,
    ListenerSide,
    Wanted,
)
from bankfull.serve.engine import gateway as gateway_module
from bankfull.serve.engine import keeper as keeper_module
from bankfull.serve.engine import remote as remote_module
from bankfull.serve.engine.backend import EngineDied, Unavailable
from bankfull.serve.engine.gateway import Gateway
from bankfull.serve.engine.link import Link
from bankfull.serve.engine.remote import RemoteEngine
from bankfull.submit import Submit
from tests.serve.engine_kit import ENDLESS, OPTIONS, PROMPT, collect, service, text_of, until
from tests.tiny import speaking_folder

TOKEN = b"t" * 32
FEW = SamplingParams(temperature=1.0, seed=1, max_tokens=6, ignore_eos=True)
SESSION = b"s" * 32


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 120))


@asynccontextmanager
async def gateway() -> AsyncIterator[tuple[Gateway, tuple[str, int]]]:
    made = Gateway(TOKEN)
    try:
        yield made, await made.start("127.0.0.1")
    finally:
        await made.close()


@asynccontextmanager
async def linked(address: Callable[[], tuple[str, int]], token: bytes = TOKEN, **how: Any) -> AsyncIterator[Link]:
    link = Link(
        str(speaking_folder()),
        OPTIONS,
        threads=1,
        open_engine=lambda receive: RemoteEngine(receive, address(), token),
        **how,
    )
    await link.start()
    try:
        yield link
    finally:
        await link.close()


async def connect(address: tuple[str, int]) -> socket.socket:
    connection = socket.socket()
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, address)
    return connection


async def closed(connection: socket.socket) -> bool:
    """Whether the other end closes the connection; whatever it still sends is read."""
    try:
        while await asyncio.get_running_loop().sock_recv(connection, 4096):
            pass
    except ConnectionError:
        pass
    return True


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_answers_are_those_of_a_child_process() -> None:
    with service() as local:
        expected = text_of(local.run(lambda link: collect(link, PROMPT, FEW)))

    async def ask() -> None:
        async with gateway() as (made, address), linked(lambda: address) as link:
            await link.wait_ready()
            assert link.engine_pid == made.engine_pid != os.getpid()
            engine = link._engine
            assert engine is not None
            await until(lambda: engine.progress > 0)  # it was warmed up, and the next heartbeat says so
            assert text_of(await collect(link, PROMPT, FEW)) == expected

    run(ask())


def test_a_killed_engine_fails_its_requests_and_is_started_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "FIRST_PAUSE", 0.0)

    async def kill() -> None:
        async with gateway() as (made, address), linked(lambda: address) as link:
            await link.wait_ready()
            stream = link.generate(Submit(PROMPT, ENDLESS))
            await anext(stream)
            first = made.engine_pid
            assert first is not None
            os.kill(first, signal.SIGKILL)
            with pytest.raises(EngineDied):
                async for _ in stream:
                    pass
            await link.wait_ready()
            assert made.sessions == 2 and made.engine_pid != first
            await collect(link, PROMPT, FEW)

    run(kill())
    assert "ended by signal 9; it is started again" in caplog.text


@pytest.mark.full
def test_an_engine_that_has_just_ended_is_unavailable() -> None:
    """Before the link knows it: the server's event loop raises RuntimeError for a write to a closed connection."""

    async def end() -> None:
        async with gateway() as (_, address), linked(lambda: address) as link:
            await link.wait_ready()
            begun = link.generate(Submit(PROMPT, ENDLESS))
            engine = link._engine
            assert engine is not None and engine._transport is not None
            engine._transport.abort()
            assert link.ready, "it does not know yet"
            with pytest.raises(Unavailable, match="has just ended"):
                link.generate(Submit(PROMPT, FEW))
            await begun.aclose()

    uvloop.run(asyncio.wait_for(end(), 120))


def test_an_engine_that_hangs_is_killed_through_its_gateway(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "FIRST_PAUSE", 0.0)

    async def hang() -> None:
        async with gateway() as (made, address), linked(lambda: address, stall_seconds=2.0) as link:
            await link.wait_ready()
            stream = link.generate(Submit(PROMPT, ENDLESS))
            await anext(stream)
            first = made.engine_pid
            assert first is not None
            os.kill(first, signal.SIGSTOP)  # its own watcher thread stops, too: only a kill ends it
            with pytest.raises(EngineDied):
                async for _ in stream:
                    pass
            await link.wait_ready()
            assert not alive(first)

    run(hang())
    assert "made no progress for 2 seconds" in caplog.text


@pytest.mark.full
def test_closing_the_link_ends_the_engine_and_frees_the_gateway() -> None:
    async def close() -> None:
        async with gateway() as (made, address):
            for _ in range(2):
                async with linked(lambda: address) as link:
                    await link.wait_ready()
                    pid = made.engine_pid
                    assert pid is not None
                await until(lambda: made.engine_pid is None)
                assert not alive(pid)

    run(close())


def test_a_gateway_that_ends_takes_its_engine_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "FIRST_PAUSE", 0.0)

    async def end() -> None:
        async with gateway() as (_, second):
            now = second
            async with gateway() as (made, first):
                now = first
                async with linked(lambda: now) as link:
                    await link.wait_ready()
                    pid = made.engine_pid
                    assert pid is not None
                    now = second
                    await made.close()
                    assert not alive(pid)
                    await until(lambda: not link.ready)
                    await link.wait_ready()
                    await collect(link, PROMPT, FEW)

    run(end())


def test_a_new_address_ends_the_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "FIRST_PAUSE", 3600.0)
    monkeypatch.setattr(keeper_module, "MOST_FAILED_LOADS", 10)

    async def move() -> None:
        async with gateway() as (_, address):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                addresses = [free.getsockname()]
            async with linked(lambda: addresses[-1]) as link:
                await until(lambda: link.failed_loads == 1)
                addresses.append(address)
                link.try_again()
                await link.wait_ready()

    run(move())


def test_a_silent_gateway_counts_as_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_module, "HEARTBEAT_SECONDS", 3600.0)
    monkeypatch.setattr(remote_module, "QUIET_SECONDS", 0.05)
    monkeypatch.setattr(remote_module, "PROBE_SECONDS", 0.1)
    monkeypatch.setattr(remote_module, "SILENT_SECONDS", 0.5)

    async def silent() -> None:
        async with gateway() as (_, address):
            engine = RemoteEngine(lambda message: None, address, TOKEN)
            await engine.start()
            await asyncio.wait_for(engine.ended, 60)
            assert "the connection to its machine was lost" in await engine.finish(0.0)

    run(silent())


@pytest.mark.parametrize("kernel", ["acknowledges", "is silent"])
def test_a_stopped_gateway_lives_as_long_as_its_kernel_acknowledges(
    kernel: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A gateway that gets no processor time is waited for; a machine that is gone is not."""
    monkeypatch.setattr(remote_module, "QUIET_SECONDS", 0.05)
    monkeypatch.setattr(remote_module, "PROBE_SECONDS", 0.1)
    monkeypatch.setattr(remote_module, "SILENT_SECONDS", 3600.0)
    monkeypatch.setattr(gateway_module, "HEARTBEAT_SECONDS", 3600.0)
    asked: list[bool] = []
    unacknowledged = remote_module._unacknowledged

    def watched(transport: asyncio.WriteTransport) -> bool:
        asked.append(unacknowledged(transport))
        return kernel == "is silent" and len(asked) == 3

    monkeypatch.setattr(remote_module, "_unacknowledged", watched)

    async def wait() -> None:
        async with gateway() as (_, address):
            engine = RemoteEngine(lambda message: None, address, TOKEN)
            await engine.start()
            if kernel == "is silent":
                await asyncio.wait_for(engine.ended, 60)
                assert len(asked) == 3 and "does not acknowledge any data" in caplog.text
            else:
                await until(lambda: len(asked) >= 5)
                assert not engine.ended.done()
                engine.kill()
            await engine.finish(0.0)
        assert not any(asked), "the loopback device has delivered every probe"

    run(wait())


# -- who may connect


def test_another_token_ends_the_link_with_one_sentence() -> None:
    async def refused() -> None:
        async with gateway() as (made, address), linked(lambda: address, token=b"x" * 32) as link:
            with pytest.raises(ModelError, match="belongs to another server or cluster"):
                await link.wait_ready()
            assert made.sessions == 0 and link.failed_loads == 1, "another attempt would fail, too"

    run(refused())


VERSIONS = [(77, bankfull.__version__), (PROTOCOL, "99.9")]


@pytest.mark.parametrize(("protocol", "version"), VERSIONS)
def test_a_gateway_of_another_version_is_named(protocol: int, version: str) -> None:
    async def ask() -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            theirs.sendall(GREETING.pack(MAGIC, protocol, version.encode(), bytes(NONCE)))
            with pytest.raises(HandshakeRefused, match=f"{version} with protocol {protocol} there"):
                await call(ours, TOKEN, CONTROL, SESSION)

    run(ask())


@pytest.mark.parametrize(("protocol", "version"), VERSIONS)
def test_a_server_of_another_version_is_refused(protocol: int, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> None:
        async with gateway() as (made, address):
            with await connect(address) as connection, monkeypatch.context() as other:
                greeting = await exactly(connection, GREETING.size)
                other.setattr(proof_module, "PROTOCOL", protocol)
                other.setattr(proof_module, "own_version", version.encode)
                other.setattr(proof_module, "check_versions", lambda *theirs: None)  # it asks all the same
                caller = CallerSide(TOKEN, CONTROL, SESSION)
                sent = caller.hello + caller.proof(greeting)
                other.undo()
                await asyncio.get_running_loop().sock_sendall(connection, sent)
                assert await exactly(connection, REPLY.size) == REPLY.pack(WRONG_VERSION, bytes(MAC))
            assert made.sessions == 0

    run(ask())


def test_garbage_and_half_handshakes_reach_nothing_and_block_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "HANDSHAKE_SECONDS", 0.5)

    async def knock() -> None:
        async with gateway() as (made, address):
            loop = asyncio.get_running_loop()
            garbage, silent, half = [await connect(address) for _ in range(3)]
            await loop.sock_sendall(garbage, b"GET / HTTP/1.1\r\n\r\n" + bytes(4096))
            await loop.sock_sendall(half, CONTROL)
            for connection in (garbage, silent, half):
                assert await closed(connection)
                connection.close()
            assert made.sessions == 0 and made.engine_pid is None
            with await connect(address) as connection:
                await call(connection, TOKEN, CONTROL, SESSION)
            assert made.sessions == 1

    run(knock())


def test_a_gateway_serves_one_server_and_one_engine_per_session() -> None:
    async def share() -> None:
        async with gateway() as (made, address):
            with await connect(address) as stray, pytest.raises(ConnectionError, match="ended the session"):
                await call(stray, TOKEN, ENGINE, SESSION)
            with await connect(address) as first:
                await call(first, TOKEN, CONTROL, SESSION)
                with await connect(address) as second, pytest.raises(ConnectionError, match="in use"):
                    await call(second, TOKEN, CONTROL, b"o" * 32)
                with await connect(address) as other, pytest.raises(ConnectionError, match="ended the session"):
                    await call(other, TOKEN, ENGINE, b"o" * 32)
                with await connect(address) as engine:
                    await call(engine, TOKEN, ENGINE, SESSION)
                    with await connect(address) as again, pytest.raises(ConnectionError, match="ended the session"):
                        await call(again, TOKEN, ENGINE, SESSION)
            await until(lambda: made.engine_pid is None)

    run(share())


def test_a_process_that_took_the_port_gets_no_prompt() -> None:
    """It forwards the handshake's bytes well, but cannot prove that it knows the token."""

    async def impostor(connection: socket.socket) -> None:
        answerer = ListenerSide(TOKEN)  # as if the true token were not needed to read it
        await asyncio.get_running_loop().sock_sendall(connection, answerer.greeting)
        assert answerer.take_hello(await exactly(connection, HELLO.size))
        assert isinstance(answerer.take_proof(await exactly(connection, MAC)), Wanted)
        await reply(connection, ACCEPTED, bytes(MAC))

    async def ask() -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            for end in (ours, theirs):
                end.setblocking(False)
            answering = asyncio.ensure_future(impostor(theirs))
            with pytest.raises(HandshakeRefused, match="could not prove"):
                await call(ours, TOKEN, CONTROL, SESSION)
            await answering

    run(ask())


def test_no_gateway_at_the_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "FIRST_PAUSE", 0.0)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    async def ask() -> None:
        async with linked(lambda: ("127.0.0.1", port)) as link:
            with pytest.raises(ModelError, match=rf"without a connection to 127.0.0.1:{port} \(Connect"):
                await link.wait_ready()

    run(ask())
