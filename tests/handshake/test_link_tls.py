"""With --link-tls nobody on the network reads or changes what crosses between machines, and who has no certificate of
the authority takes no part, although it knows the token."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from bankfull import SamplingParams
from bankfull.cli.app import run_command
from bankfull.errors import ConfigError
from bankfull.fleet.routing import routing_policy
from bankfull.handshake.link_tls import FILES, LinkTls
from bankfull.outputs import Delta
from bankfull.serve.engine import gateway as gateway_module
from bankfull.serve.engine.gateway import Gateway
from bankfull.serve.engine.link import Link
from bankfull.serve.engine.remote import RemoteEngine
from bankfull.serve.engine.wire import ExchangeEnds, Failed, FromEngine, LoadingPhase
from bankfull.serve.replicas.separate_set import SeparateSet
from bankfull.state.disk import DamagedPlace
from bankfull.state.exchange import ExchangeShape
from bankfull.state.page_listener import PageListener
from bankfull.state.socket_carrier import SocketCarrier
from bankfull.submit import Submit
from tests.handshake.wiretap import Wiretap, tapped
from tests.serve.engine_kit import OPTIONS, PROMPT, collect, service, text_of
from tests.tiny import speaking_folder

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")

HOST, TOKEN = "127.0.0.1", b"t" * 32
SHAPE = ExchangeShape(bytes(range(32)), pages=3, slots=0, page_bytes=4 << 20, slot_bytes=0)
PAGE = b"what a client has asked, and more" * 4096
PAGE += bytes(SHAPE.page_bytes - len(PAGE))
SECRET_TEXT = b"what a client has asked"
ENGINE_STAND_IN = """
import json, socket, sys
from bankfull.handshake import inherited
from bankfull.handshake.proof import TAG, Seal
from bankfull.serve.engine.wire import LoadingPhase, pack
inherited.inherit(int(sys.argv[3]))
connection = socket.socket(fileno=int(sys.argv[1]))
got = b""
while got[-TAG - 3:-TAG] != b"END":
    part = connection.recv(1 << 16)
    if not part:
        sys.exit(3)
    got += part
own = inherited.inherited()
if not Seal(own.link.of_caller).opens(got[-TAG:], got[:-TAG]):
    sys.exit(4)
message = pack(LoadingPhase(f"{len(got) - TAG} bytes at {own.host}: {got[:23].decode()}"))
connection.sendall(message + Seal(own.link.of_listener).tag(message))
sys.exit(7)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LinkTls]:
    """Two clusters, and a machine with the authority of one and a certificate of the other."""
    place = tmp_path_factory.mktemp("certificates")
    for name in ("own", "foreign"):
        folder = place / name
        folder.mkdir()
        certificate, key, authority = (folder / file for file in FILES)
        new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
        command = ["openssl", "req", "-x509", *new, "-keyout", key, "-out", certificate]
        subprocess.run(command, check=True, capture_output=True)
        shutil.copy(certificate, authority)
    shutil.copytree(place / "foreign", place / "mixed")
    shutil.copy(place / "own" / "ca.crt", place / "mixed" / "ca.crt")
    return {name: LinkTls(place / name) for name in ("own", "foreign", "mixed")}


@contextmanager
def paged(ours: LinkTls | None, theirs: LinkTls | None) -> Iterator[tuple[SocketCarrier, PageListener, Wiretap]]:
    """A sender with our files, a network, and a receiver with theirs."""
    listener, carrier = PageListener(SHAPE, HOST, TOKEN, theirs), SocketCarrier(TOKEN, SHAPE.identity, ours)
    try:
        with tapped(listener.address) as tap:
            carrier.locate(0, tap.address)
            yield carrier, listener, tap
    finally:
        carrier.close()
        listener.close()


def sent(carrier: SocketCarrier, place: int = 1) -> None:
    carrier.carry(0, "pages", place, b"name", memoryview(PAGE))


def holds(listener: PageListener, place: int = 1) -> bool:
    into = bytearray(SHAPE.page_bytes)
    try:
        listener.files["pages"].read(place, b"name", memoryview(into))
    except DamagedPlace:
        return False
    return into == PAGE


# -- pages


def test_pages_are_read_by_their_engine_and_by_nobody_on_the_way(made: dict[str, LinkTls]) -> None:
    with paged(None, None) as (carrier, listener, tap):
        sent(carrier)
        assert holds(listener) and SECRET_TEXT in tap.heard, "the wiretap hears, or this proves nothing"
    with paged(made["own"], made["own"]) as (carrier, listener, tap):
        for place in (1, 2, 3):
            sent(carrier, place)
            assert holds(listener, place)
        assert len(tap.heard) > 3 * SHAPE.page_bytes and SECRET_TEXT not in tap.heard
        assert b"name" not in tap.heard, "nor are the names of content"


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ("mixed", "own", "alert unknown ca"),  # a sender that knows the secret, without a certificate of this cluster
        ("foreign", "own", "certificate verify failed"),
        ("own", "mixed", "certificate verify failed"),
        ("own", None, "gets no state"),  # a receiver without TLS
        (None, "own", "has closed the connection"),
    ],
)
def test_no_page_passes_between_engines_without_a_common_authority(
    made: dict[str, LinkTls], ours: str | None, theirs: str | None, said: str
) -> None:
    with paged(made[ours] if ours else None, made[theirs] if theirs else None) as (carrier, listener, tap):
        with pytest.raises(DamagedPlace, match=said):
            sent(carrier)
        assert not holds(listener)
        assert ours is None or SECRET_TEXT not in tap.heard


def test_a_page_that_is_changed_on_the_way_is_not_kept(made: dict[str, LinkTls]) -> None:
    with paged(made["own"], made["own"]) as (carrier, listener, tap):
        sent(carrier)
        tap.change = lambda part: part[:-1] + bytes([part[-1] ^ 1])
        with pytest.raises(DamagedPlace):
            sent(carrier, 2)
        assert not holds(listener, 2)


def test_a_caller_that_says_nothing_after_its_proof_ends_in_time(
    made: dict[str, LinkTls], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bankfull.state.page_listener.CONNECT_SECONDS", 0.2)
    listener, silent = PageListener(SHAPE, HOST, TOKEN, made["own"]), SocketCarrier(TOKEN, SHAPE.identity)
    silent.locate(0, listener.address)
    try:
        line = silent._receivers[0]._opened()
        until(lambda: not listener._lines)
        line.close()
    finally:
        silent.close()
        listener.close()


def test_replaced_files_are_used_by_the_next_connection(made: dict[str, LinkTls], tmp_path: Path) -> None:
    tls = LinkTls(tmp_path / "tls")
    shutil.copytree(made["foreign"].folder, tls.folder)
    with paged(tls, made["own"]) as (carrier, listener, _):
        with pytest.raises(DamagedPlace):
            sent(carrier)
        shutil.copytree(made["own"].folder, tls.folder, dirs_exist_ok=True)
        carrier._receivers[0]._rests_until = 0.0
        sent(carrier)
        assert holds(listener)


def test_an_engine_whose_files_are_gone_says_so(made: dict[str, LinkTls], tmp_path: Path) -> None:
    gone = LinkTls(tmp_path)
    with paged(gone, made["own"]) as (carrier, _, _), pytest.raises(DamagedPlace, match=r"has no file tls\.crt"):
        sent(carrier)
    with paged(made["own"], gone) as (carrier, _, _), pytest.raises(DamagedPlace, match="cannot use its files"):
        sent(carrier)


# -- the server and its engines


def until(what: Callable[[], bool]) -> None:
    ends = time.monotonic() + 30
    while not what():
        assert time.monotonic() < ends, "it never happens"
        time.sleep(0.002)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 120))


@asynccontextmanager
async def gateway(tls: LinkTls | None) -> AsyncIterator[tuple[Gateway, Wiretap]]:
    made = Gateway(TOKEN, tls=tls)
    address = await made.start(HOST)
    try:
        with tapped(address) as tap:
            yield made, tap
    finally:
        await made.close()


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        gateway_module, "worker_command", lambda *files: [sys.executable, "-c", ENGINE_STAND_IN, *map(str, files)]
    )


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("encrypted", [False, True])
def test_what_a_server_and_its_engine_tell_each_other_is_heard_by_nobody(
    made: dict[str, LinkTls], encrypted: bool
) -> None:
    tls = made["own"] if encrypted else None

    async def talk() -> None:
        async with gateway(tls) as (_, tap):
            told: list[FromEngine] = []
            engine = RemoteEngine(told.append, tap.address, TOKEN, tls)
            await engine.start()
            message = SECRET_TEXT + bytes(2 << 20) + b"END"  # more than any buffer on the way
            engine.send(message)
            await engine.ended
            assert await engine.finish(30) == "with status 7", "the gateway reports on its other connection"
            (answer,) = told
            assert isinstance(answer, LoadingPhase)
            host = HOST if encrypted else ""
            assert answer.text.startswith(f"{len(message)} bytes at {host}: {SECRET_TEXT.decode()}")
            assert (SECRET_TEXT in tap.heard, b"bytes at" in tap.heard) == (not encrypted, not encrypted)

    run(talk())


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(("ours", "theirs"), [("mixed", "own"), ("own", "mixed"), ("own", None)])
def test_a_server_without_a_common_authority_sends_its_engine_nothing(
    made: dict[str, LinkTls], ours: str, theirs: str | None
) -> None:
    async def talk() -> None:
        async with gateway(made[theirs] if theirs else None) as (listening, tap):
            told: list[FromEngine] = []
            engine = RemoteEngine(told.append, tap.address, TOKEN, made[ours])
            try:
                await engine.start()
                engine.send(SECRET_TEXT + b"END")
                await engine.ended
            except OSError:
                pass
            await engine.finish(30)
            assert not told
            assert SECRET_TEXT not in tap.heard
            while listening._session is not None:
                await asyncio.sleep(0.005)

    run(talk())


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("encrypted", [False, True])
def test_a_message_to_an_engine_that_is_changed_on_the_way_ends_the_connection(
    made: dict[str, LinkTls], encrypted: bool
) -> None:
    tls = made["own"] if encrypted else None

    async def talk() -> None:
        async with gateway(tls) as (_, tap):
            told: list[FromEngine] = []
            engine = RemoteEngine(told.append, tap.address, TOKEN, tls)
            await engine.start()
            tap.change = lambda part: part[:-1] + bytes([part[-1] ^ 1])
            engine.send(SECRET_TEXT + b"END")
            await engine.ended
            await engine.finish(30)
            assert not told

    run(talk())


@pytest.mark.usefixtures("stand_in")
def test_a_heartbeat_that_is_changed_on_the_way_is_noticed_without_tls(caplog: pytest.LogCaptureFixture) -> None:
    """Else somebody on the way could hide that an engine hangs."""

    async def talk() -> None:
        async with gateway(None) as (_, tap):
            engine = RemoteEngine(lambda message: None, tap.address, TOKEN)
            await engine.start()
            tap.change_answers = lambda part: part[:8] + bytes([part[8] ^ 1]) + part[9:]
            await engine.ended
            assert "the connection to its machine was lost" in await engine.finish(0.0)
            assert "A heartbeat is not what the gateway has sent" in caplog.text

    run(talk())


def test_a_machine_without_files_refuses_the_server_by_one_sentence(
    made: dict[str, LinkTls], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def talk() -> None:
        async with gateway(LinkTls(tmp_path)) as (_, tap):
            told: list[FromEngine] = []
            engine = RemoteEngine(told.append, tap.address, TOKEN, made["own"])
            with pytest.raises(ConnectionError, match="cannot use its files for --link-tls"):
                await engine.start()
            assert isinstance(told[0], Failed)
            assert "has no file tls.crt" in caplog.text

    run(talk())


@pytest.mark.full
def test_answers_over_tls_are_those_of_a_child_process(made: dict[str, LinkTls]) -> None:
    few = SamplingParams(temperature=1.0, seed=1, max_tokens=6, ignore_eos=True)
    with service() as local:
        expected = text_of(local.run(lambda link: collect(link, PROMPT, few)))

    async def ask() -> None:
        async with gateway(made["own"]) as (listening, tap):

            def open_engine(receive: Callable[[FromEngine], None]) -> RemoteEngine:
                return RemoteEngine(receive, tap.address, TOKEN, made["own"])

            link = Link(str(speaking_folder()), OPTIONS, threads=1, open_engine=open_engine)
            await link.start()
            try:
                await link.wait_ready()
                assert link.engine_pid == listening.engine_pid != os.getpid()
                assert text_of(await collect(link, PROMPT, few)) == expected
            finally:
                await link.close()
            assert str(speaking_folder()).encode() not in tap.heard, "the model's name is in the first message"

    run(ask())


@pytest.mark.full
def test_pools_behind_gateways_hand_over_their_state_over_tls(made: dict[str, LinkTls]) -> None:
    """An engine whose connection its gateway holds still listens for pages where others reach its machine."""
    here, prompt = "127.0.0.2", [3 + 7 * i % 290 for i in range(130)]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    options = {"dtype": "float32", "memory": "1MiB", "page_tokens": 4}

    async def ask() -> None:
        gateways = [Gateway(TOKEN, tls=made["own"]) for _ in range(2)]
        addresses = [await gateway.start(here) for gateway in gateways]

        def link(at: tuple[str, int], own: int | None) -> Link:
            return Link(
                str(speaking_folder()),
                options,
                threads=1,
                tells_prefixes=True,
                exchange=ExchangeEnds([], 1 << 20, own, 1, tls=str(made["own"].folder)),
                open_engine=lambda receive: RemoteEngine(receive, at, TOKEN, made["own"]),
            )

        prefill, decode = link(addresses[0], None), link(addresses[1], 0)
        pools = SeparateSet({"prefill-0": prefill}, {"decode-0": decode}, routing_policy("prefix"))
        await pools.start()
        try:
            await pools.wait_all_ready()
            assert decode.facts is not None and decode.facts.exchange_at is not None
            assert decode.facts.exchange_at[0] == here
            deltas = [item async for items in pools.generate(Submit(prompt, params)) for item in items]
            assert sum(len(item.token_ids) for item in deltas if isinstance(item, Delta)) == 6
            assert (pools.counts.pages, pools.counts.late) == (32, 0)
        finally:
            await pools.close()
            for gateway in gateways:
                await gateway.close()

    run(ask())


# -- the option


@pytest.mark.parametrize("name", FILES)
def test_files_that_cannot_be_used_are_named(made: dict[str, LinkTls], name: str, tmp_path: Path) -> None:
    tls = LinkTls(tmp_path / "tls")
    shutil.copytree(made["own"].folder, tls.folder)
    (tls.folder / name).write_text("nothing")
    with pytest.raises(ConfigError, match=r"--link-tls .* cannot be used"):
        tls.calling()
    (tls.folder / name).unlink()
    with pytest.raises(ConfigError, match=f"has no file {name}"):
        tls.answering()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "is for engines that are reached over TCP"),
        (["--replicas", "2"], "is for engines that are reached over TCP"),
        (["--separate", "prefill=1,decode=1"], "is for engines that are reached over TCP"),
        (["--replicas", "2", "--ray", "local", "--parallel", "tp=2"], "does not reach what the ranks"),
        (["--separate", "prefill=1,decode=1,link=socket"], "has no file tls.crt"),
        (["--replicas", "2", "--ray", "local"], "has no file tls.crt"),
    ],
)
def test_link_tls_is_refused_where_it_would_protect_nothing(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert run_command(["serve", "nowhere", "--link-tls", str(tmp_path), *options]) == 2
    found = capsys.readouterr().err
    assert said in found and found.count("\n") == 1
