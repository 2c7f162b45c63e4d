"""Connections that say nothing, or read nothing: they hold nothing up, and they hold nothing for long."""

from __future__ import annotations

import asyncio
import resource
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from bankfull.errors import ConfigError
from bankfull.serve.guard.checks import Guard, open_doors
from bankfull.serve.guard.keys import Keyring, new_key
from bankfull.serve.guard.listen import PIECE_BYTES
from bankfull.serve.guard.lobby import Lobby, LobbyLimits, address_of
from bankfull.serve.guard.tls import Tls, certificates_of
from bankfull.serve.telemetry.metrics import Metrics
from bankfull.serve.telemetry.watch import Watch
from tests.serve.listening import Listening, listening

BOSS, BOSS_KEY = new_key("boss", admin=True)
ALICE, ALICE_KEY = new_key("alice")
LARGE = 16 << 20
"""More than the system takes for somebody who does not read."""
NEEDS_OPENSSL = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")


async def app(scope: Any, receive: Any, send: Any) -> None:
    """/large is more than any buffer holds; /slow never ends; /stream has many small pieces."""
    if scope["path"] == "/slow":
        while (await receive())["type"] != "http.disconnect":
            pass
        return
    await receive()
    headers = []
    if scope["path"] == "/large":
        headers = [(b"content-length", str(LARGE).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if scope["path"] == "/stream":
        for _ in range(LARGE // 4096):
            await send({"type": "http.response.body", "body": b"x" * 4096, "more_body": True})
    await send({"type": "http.response.body", "body": b"x" * LARGE if scope["path"] == "/large" else b"ok"})


def eventually(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


class Client:
    """One connection, which reads only when it is told to."""

    def __init__(self, port: int, source: str = "127.0.0.1", wrap: Callable[[socket.socket], Any] | None = None):
        self.raw = socket.socket()
        self.raw.settimeout(60)
        self.raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
        self.raw.bind((source, 0))
        self.raw.connect(("127.0.0.1", port))
        self.socket = self.raw if wrap is None else wrap(self.raw)

    def ask(self, path: str, key: str = "", **headers: str) -> None:
        lines = [f"GET {path} HTTP/1.1", "host: localhost", *([f"x-api-key: {key}"] if key else [])]
        self.socket.sendall("\r\n".join([*lines, "", ""]).encode())

    def status(self, path: str, key: str = "") -> int:
        """Of a whole exchange; 0 where the server hung up."""
        try:
            self.ask(path, key)
            head = b""
            while not head.endswith((b"0\r\n\r\n", b"}")):
                piece = self.socket.recv(4096)
                if not piece:
                    return 0
                head += piece
        except (ConnectionError, ssl.SSLError):
            return 0
        return int(head.split()[1])

    def open(self) -> bool:
        """Whether the server has not hung up. Reads nothing that it has sent."""
        self.raw.setblocking(False)
        try:
            return bool(self.raw.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            self.raw.settimeout(60)

    def rest(self) -> int:
        """Bytes until the server hangs up."""
        count = 0
        try:
            while piece := self.socket.recv(65536):
                count += len(piece)
        except (ConnectionError, ssl.SSLError):
            pass
        return count

    def close(self) -> None:
        self.socket.close()


@contextmanager
def serving(limits: LobbyLimits, keys: bool = False, **options: Any) -> Iterator[tuple[Listening, Lobby]]:
    lobby = Lobby(limits)
    doors = open_doors(Keyring((BOSS_KEY, ALICE_KEY) if keys else ()), host="127.0.0.1")
    with listening(Watch(Guard(app, doors), Metrics()), lobby=lobby, **options) as server:
        yield server, lobby


def opened(stack: ExitStack, port: int, count: int, source: str = "127.0.0.1") -> list[Client]:
    return [stack.enter_context(closing(Client(port, source))) for _ in range(count)]


# -- silence


@pytest.mark.parametrize("said", [b"", b"GET /live HT", b"GET /live HTTP/1.1\r\nhost: localhost\r\nx-a: 1"])
def test_whoever_does_not_ask_is_not_kept(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bankfull.serve.guard.listen.HEAD_SECONDS", 0.3)
    with serving(LobbyLimits()) as (server, lobby), closing(Client(server.port)) as client:
        client.socket.sendall(said)
        answer = b"".join(iter(lambda: client.socket.recv(4096), b""))
        assert answer.startswith(b"HTTP/1.1 408") if said else answer == b""
        eventually(lambda: lobby.count == 0, "it still has its place")


def test_a_head_that_trickles_has_no_more_time_than_one_that_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bankfull.serve.guard.listen.HEAD_SECONDS", 0.5)
    with serving(LobbyLimits()) as (server, _), closing(Client(server.port)) as client:
        sent = 0
        with pytest.raises(OSError):
            while sent < 1000:
                client.socket.sendall(b"G")
                sent += 1
                time.sleep(0.05)


def test_what_comes_early_does_not_end_an_answer_and_has_its_time_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The beginning of a next request, or the line break that old clients send behind a body."""

    async def slowly(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        for _ in range(4):
            await asyncio.sleep(0.2)
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    monkeypatch.setattr("bankfull.serve.guard.listen.HEAD_SECONDS", 0.3)
    for early in (b"\r\n", b"GET /next"):
        with listening(slowly) as server, closing(Client(server.port)) as client:
            client.ask("/")
            said = client.socket.recv(4096)
            client.socket.sendall(early)
            said += b"".join(iter(lambda: client.socket.recv(4096), b""))
        answer, _, rest = said.partition(b"\r\n\r\nxxxx")
        assert answer.startswith(b"HTTP/1.1 200") and rest.startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("first", ["nothing", "a part", "a call"])
def test_silent_connections_of_one_address_keep_nobody_out(first: str) -> None:
    """More of them than there may be at all, from the same address as those who ask, and as the probe."""
    with serving(LobbyLimits(connections=40, per_address=20, reserved=2)) as (server, lobby), ExitStack() as stack:
        silent = []
        for _ in range(100):
            silent += opened(stack, server.port, 1)
            if first == "a part":
                silent[-1].socket.sendall(b"GET /x HTTP/1.1\r\nhost: l")
            elif first == "a call":
                assert silent[-1].status("/x") == 200
        eventually(lambda: sum(client.open() for client in silent) <= 20, "none of them was closed")
        for path in ("/live", "/x", "/ready"):
            client = stack.enter_context(closing(Client(server.port)))
            assert client.status(path) == 200
        assert lobby.count <= 20 and lobby.on_reserve == 0


def test_silent_connections_of_many_addresses_keep_nobody_out() -> None:
    with serving(LobbyLimits(connections=30, per_address=10, reserved=2)) as (server, lobby), ExitStack() as stack:
        for last in range(2, 12):
            opened(stack, server.port, 9, f"127.0.0.{last}")
        eventually(lambda: lobby.count == 30, "there are more than there may be")
        client = stack.enter_context(closing(Client(server.port)))
        assert client.status("/x") == 200


def test_whoever_is_being_answered_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(LobbyLimits(connections=10, per_address=0, reserved=2)) as (server, lobby), ExitStack() as stack:
        busy = opened(stack, server.port, 5)
        for client in busy:
            client.ask("/slow")
        eventually(lambda: len(lobby._waiting) == 0, "their requests were not read")
        silent = opened(stack, server.port, 50)
        eventually(lambda: sum(client.open() for client in silent) == 5, "there are more than there may be")
        assert all(client.open() for client in busy)


def test_where_all_are_busy_probes_and_admins_have_a_reserve() -> None:
    with serving(LobbyLimits(connections=5, reserved=3), keys=True) as (server, lobby), ExitStack() as stack:
        busy = []
        for last in range(2, 7):
            busy += opened(stack, server.port, 1, f"127.0.0.{last}")
            busy[-1].ask("/slow", ALICE)
        eventually(lambda: lobby.count == 5 and not lobby._waiting, "their requests were not read")
        for path, key, status in (
            ("/live", "", 200),
            ("/ready", "", 200),
            ("/metrics", ALICE, 200),
            ("/x", BOSS, 200),
            ("/x", ALICE, 503),
        ):
            client = stack.enter_context(closing(Client(server.port)))
            assert client.status(path, key) == status, path
        # The reserve is not for those who keep it to themselves, either.
        taken = [stack.enter_context(closing(Client(server.port))) for _ in range(9)]
        assert taken[-1].status("/live") == 200
        busy[0].close()
        eventually(lambda: lobby.count <= 5 + 2, "whoever left has still its place")
        late = stack.enter_context(closing(Client(server.port)))
        eventually(lambda: late.status("/x", ALICE) in (200, 0), "there is room again")


def test_the_limit_of_an_address_leaves_others_alone_and_can_be_taken_away() -> None:
    for per_address, answered in ((3, 503), (0, 200)):
        limits = LobbyLimits(connections=20, per_address=per_address, reserved=4)
        with serving(limits) as (server, lobby), ExitStack() as stack:
            for client in opened(stack, server.port, 3):
                client.ask("/slow")
            eventually(lambda: not lobby._waiting and lobby.count == 3, "their requests were not read")
            assert stack.enter_context(closing(Client(server.port))).status("/x") == answered
            assert stack.enter_context(closing(Client(server.port, "127.0.0.9"))).status("/x") == 200
            assert stack.enter_context(closing(Client(server.port))).status("/live") == 200


def test_addresses_that_one_host_has_are_counted_together() -> None:
    assert address_of(("2001:db8::1", 1)) == address_of(("2001:db8::ffff:2", 9))
    assert address_of(("2001:db8::1", 1)) != address_of(("2001:db8:0:1::1", 1))
    assert address_of(("::ffff:192.0.2.1", 1)) == address_of(("192.0.2.1", 2)) == "192.0.2.1"
    assert address_of(("fe80::1%eth0", 1)) == address_of(("fe80::2", 1))
    assert address_of(None) == "" and address_of(("::1", 1)) == "::1"


def test_limits_that_let_nobody_in_are_refused() -> None:
    for wrong in ({"connections": 0}, {"per_address": -1}):
        with pytest.raises(ConfigError, match="too few"):
            LobbyLimits(**wrong)
    assert LobbyLimits(connections=100).of_one_address == 25 and LobbyLimits(connections=2).of_one_address == 1


def test_there_are_no_more_connections_than_files() -> None:
    program = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))\n"
        "from bankfull.serve.guard.listen import raise_file_limit\n"
        "print(raise_file_limit(4000), resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < 5000:
        pytest.skip("the system allows too few open files")
    for limits, connections, files in (((1024, 5000), 4000, 4576), ((256, 2048), 1472, 2048), ((100, 100), 25, 100)):
        command = [sys.executable, "-c", program, *map(str, limits)]
        made = subprocess.run(command, capture_output=True, text=True, check=True)
        assert made.stdout.split() == [str(connections), str(files)]
        assert ("at most" in made.stderr) == (connections < 4000)


# -- clients that do not read


@pytest.mark.parametrize("path", ["/large", "/stream"])
def test_whoever_does_not_read_is_cut_and_nothing_is_held_for_it(path: str) -> None:
    limits = LobbyLimits(read_seconds=0.8, unread_bytes=16 * LARGE)
    with serving(limits) as (server, lobby), ExitStack() as stack:
        clients = opened(stack, server.port, 8)
        for client in clients:
            client.ask(path)
        eventually(lambda: lobby.count == 8, "they have not come")
        eventually(lambda: lobby.count == 0, "they are still there")
        assert lobby.held == 0 and not lobby._sending
        for client in clients:
            assert client.rest() < LARGE


def test_what_is_held_for_all_who_do_not_read_is_bounded() -> None:
    limits = LobbyLimits(read_seconds=600, unread_bytes=3 * LARGE)
    with serving(limits) as (server, lobby), ExitStack() as stack:
        most = 0
        clients = []
        for number in range(20):
            clients += opened(stack, server.port, 1)
            clients[-1].ask("/large")
            eventually(lambda: len(lobby._sending) >= min(number + 1, 3), "it was not asked for")  # noqa: B023
            most = max(most, lobby.held, sum(guest.held + guest.unwritten for guest in list(lobby._guests)))
        assert LARGE < most <= 3 * LARGE + 20 * 2 * PIECE_BYTES
        eventually(lambda: lobby.count <= 4, "those who held too much were not cut")
        # Whoever reads has all of it, however many do not.
        client = stack.enter_context(closing(Client(server.port)))
        client.socket.sendall(b"GET /large HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert client.rest() > LARGE


def test_who_reads_slowly_but_reads_is_not_cut() -> None:
    limits = LobbyLimits(read_seconds=1.6, read_bytes=10_000)
    with serving(limits) as (server, _), closing(Client(server.port)) as client:
        client.socket.sendall(b"GET /large HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        count = 0
        for _ in range(20):
            time.sleep(0.2)
            count += len(client.socket.recv(100_000))
        assert count < LARGE, "it was no slow reader"
        assert count + client.rest() > LARGE


def test_an_answer_that_is_sent_in_pieces_is_the_same() -> None:
    with serving(LobbyLimits()) as (server, _):
        said = server.say(b"GET /large HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        head, _, body = said.partition(b"\r\n\r\n")
        assert body == b"x" * LARGE and b"content-length: %d" % LARGE in head.lower()


# -- TLS


def made_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    folder.mkdir(exist_ok=True)
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    subject = ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate]
    subprocess.run([*command, *subject], check=True, capture_output=True)
    return certificate, key


def trusting(certificate: Path) -> Callable[[socket.socket], ssl.SSLSocket]:
    context = ssl.create_default_context(cafile=certificate)
    return lambda raw: context.wrap_socket(raw, server_hostname="localhost")


@NEEDS_OPENSSL
def test_connections_that_never_speak_tls_have_the_same_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = made_certificate(tmp_path / "a", "first")
    limits = LobbyLimits(connections=20, per_address=10, read_seconds=0.8)
    with (
        serving(limits, certificates=certificates_of(Tls(certificate, key))) as (server, lobby),
        ExitStack() as stack,
    ):
        silent = opened(stack, server.port, 60)
        eventually(lambda: sum(client.open() for client in silent) <= 10, "none of them was closed")
        client = stack.enter_context(closing(Client(server.port, wrap=trusting(certificate))))
        assert client.status("/live") == 200
        stuck = stack.enter_context(closing(Client(server.port, wrap=trusting(certificate))))
        stuck.ask("/large")
        eventually(lambda: lobby.held > 0, "it was not asked for")
        eventually(lambda: lobby.held == 0, "it is held for somebody who does not read")
        assert stuck.rest() < LARGE
        monkeypatch.setattr("bankfull.serve.guard.listen.HEAD_SECONDS", 0.3)
        late = stack.enter_context(closing(Client(server.port)))
        late.socket.sendall(b"\x16\x03\x01")
        assert late.rest() == 0 and not late.open()


@NEEDS_OPENSSL
def test_a_certificate_that_was_replaced_is_shown_to_whoever_comes_next(tmp_path: Path) -> None:
    certificate, key = made_certificate(tmp_path / "used", "first")
    second, second_key = made_certificate(tmp_path / "new", "second")
    certificates = certificates_of(Tls(certificate, key))
    assert certificates is not None

    def name(server: Listening, trusted: Path) -> str:
        with closing(Client(server.port, wrap=trusting(trusted))) as client:
            assert client.status("/live") == 200
            return dict(pair[0] for pair in client.socket.getpeercert()["subject"])["commonName"]

    with serving(LobbyLimits(), certificates=certificates) as (server, _):
        with closing(Client(server.port, wrap=trusting(certificate))) as before:
            assert name(server, certificate) == "first"
            second.replace(certificate)
            certificates.look()  # its key has not been replaced yet
            second_key.replace(key)
            certificates.look()
            assert name(server, certificate) == "second"
            assert before.status("/live") == 200, "whoever was there stays"
        certificate.write_text("nonsense")
        certificates.look()
        certificates.look(final=True)
        with closing(socket.create_connection(("127.0.0.1", server.port), timeout=60)) as raw:
            shown = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            shown.check_hostname, shown.verify_mode = False, ssl.CERT_NONE
            with shown.wrap_socket(raw) as client:
                assert client.getpeercert(binary_form=True), "a broken one changes nothing"


@NEEDS_OPENSSL
def test_a_key_with_a_password_is_refused_and_never_asked_for(tmp_path: Path) -> None:
    certificate, key = made_certificate(tmp_path / "a", "first")
    locked = tmp_path / "locked.pem"
    command = ["openssl", "rsa", "-aes256", "-passout", "pass:secret", "-in", key, "-out", locked]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(ConfigError, match="cannot be used"):
        certificates_of(Tls(certificate, locked))
    assert certificates_of(Tls(certificate, locked, "secret")) is not None


def test_the_event_loop_of_python_itself_serves_too() -> None:
    """uvloop is what the server uses; its transports differ from asyncio's in what they do at once."""
    lobby = Lobby(LobbyLimits(read_seconds=0.8))
    doors = open_doors(Keyring(), host="127.0.0.1")
    with (
        listening(Watch(Guard(app, doors), Metrics()), lobby=lobby, loop="asyncio") as server,
        closing(Client(server.port)) as client,
    ):
        assert client.status("/x") == 200
        client.ask("/large")
        eventually(lambda: lobby.held > 0, "it was not asked for")
        eventually(lambda: lobby.count == 0, "it does not read, and is still there")
    assert lobby.held == 0
