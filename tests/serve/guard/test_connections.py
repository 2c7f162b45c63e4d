"""Connections that send nothing or read nothing: they block no other client, and their memory is freed soon."""

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
from bankfull.serve.guard.checks import Guard, access_policy
from bankfull.serve.guard.connections import ConnectionLimits, ConnectionTable, address_of
from bankfull.serve.guard.keys import Keyring, new_key
from bankfull.serve.guard.listen import CHUNK_BYTES
from bankfull.serve.guard.tls import Tls, certificates_of
from bankfull.serve.telemetry.metrics import ServiceMetrics
from bankfull.serve.telemetry.watch import Watch
from tests.serve.listening import Listening, listening

BOSS, BOSS_KEY = new_key("boss", admin=True)
ALICE, ALICE_KEY = new_key("alice")
LARGE = 16 << 20
"""More bytes than the kernel buffers for a client that does not read."""
NEEDS_OPENSSL = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")


async def app(scope: Any, receive: Any, send: Any) -> None:
    """/large exceeds every buffer; /slow never ends; /stream has many small parts."""
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
    """One connection, which reads only on demand."""

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
        """The status of one request; 0 if the server closed the connection."""
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
        """Whether the server keeps the connection open. Reads none of the data sent."""
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
        """Bytes received until the server closes the connection."""
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
def serving(
    limits: ConnectionLimits, keys: bool = False, **options: Any
) -> Iterator[tuple[Listening, ConnectionTable]]:
    table = ConnectionTable(limits)
    access = access_policy(Keyring((BOSS_KEY, ALICE_KEY) if keys else ()), host="127.0.0.1")
    with listening(Watch(Guard(app, access), ServiceMetrics()), connection_table=table, **options) as server:
        yield server, table


def opened(stack: ExitStack, port: int, count: int, source: str = "127.0.0.1") -> list[Client]:
    return [stack.enter_context(closing(Client(port, source))) for _ in range(count)]


# -- idle connections


@pytest.mark.parametrize("received", [b"", b"GET /live HT", b"GET /live HTTP/1.1\r\nhost: localhost\r\nx-a: 1"])
def test_a_connection_without_a_request_times_out(received: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bankfull.serve.guard.listen.HEAD_SECONDS", 0.3)
    with serving(ConnectionLimits()) as (server, table), closing(Client(server.port)) as client:
        client.socket.sendall(received)
        answer = b"".join(iter(lambda: client.socket.recv(4096), b""))
        assert answer.startswith(b"HTTP/1.1 408") if received else answer == b""
        eventually(lambda: table.count == 0, "the connection is still open")


def test_a_trickling_head_gets_no_more_time_than_a_stopped_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bankfull.serve.guard.listen.HEAD_SECONDS", 0.5)
    with serving(ConnectionLimits()) as (server, _), closing(Client(server.port)) as client:
        sent = 0
        with pytest.raises(OSError):
            while sent < 1000:
                client.socket.sendall(b"G")
                sent += 1
                time.sleep(0.05)


def test_an_early_next_request_does_not_end_a_response_and_times_out_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start of a next request, or the line break that old clients send after a body."""

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
            received = client.socket.recv(4096)
            client.socket.sendall(early)
            received += b"".join(iter(lambda: client.socket.recv(4096), b""))
        answer, _, rest = received.partition(b"\r\n\r\nxxxx")
        assert answer.startswith(b"HTTP/1.1 200") and rest.startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("first", ["nothing", "a part", "a call"])
def test_idle_connections_of_one_address_keep_no_client_out(first: str) -> None:
    """More idle connections than the limit, from the address of the clients and of the probe."""
    with (
        serving(ConnectionLimits(connections=40, per_address=20, reserved=2)) as (server, table),
        ExitStack() as stack,
    ):
        silent = []
        for _ in range(100):
            silent += opened(stack, server.port, 1)
            if first == "a part":
                silent[-1].socket.sendall(b"GET /x HTTP/1.1\r\nhost: l")
            elif first == "a call":
                assert silent[-1].status("/x") == 200
        eventually(lambda: sum(client.open() for client in silent) <= 20, "no connection was closed")
        for path in ("/live", "/x", "/ready"):
            client = stack.enter_context(closing(Client(server.port)))
            assert client.status(path) == 200
        assert table.count <= 20 and table.reserved == 0


def test_idle_connections_of_many_addresses_keep_no_client_out() -> None:
    with (
        serving(ConnectionLimits(connections=30, per_address=10, reserved=2)) as (server, table),
        ExitStack() as stack,
    ):
        for last in range(2, 12):
            opened(stack, server.port, 9, f"127.0.0.{last}")
        eventually(lambda: table.count == 30, "there are more connections than the limit")
        client = stack.enter_context(closing(Client(server.port)))
        assert client.status("/x") == 200


def test_a_busy_connection_is_never_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        serving(ConnectionLimits(connections=10, per_address=0, reserved=2)) as (server, table),
        ExitStack() as stack,
    ):
        busy = opened(stack, server.port, 5)
        for client in busy:
            client.ask("/slow")
        eventually(lambda: len(table._idle) == 0, "their requests were not read")
        silent = opened(stack, server.port, 50)
        eventually(lambda: sum(client.open() for client in silent) == 5, "there are more connections than the limit")
        assert all(client.open() for client in busy)


def test_probes_and_admins_have_a_reserve_when_all_connections_are_busy() -> None:
    with (
        serving(ConnectionLimits(connections=5, reserved=3), keys=True) as (server, table),
        ExitStack() as stack,
    ):
        busy = []
        for last in range(2, 7):
            busy += opened(stack, server.port, 1, f"127.0.0.{last}")
            busy[-1].ask("/slow", ALICE)
        eventually(lambda: table.count == 5 and not table._idle, "their requests were not read")
        for path, key, status in (
            ("/live", "", 200),
            ("/ready", "", 200),
            ("/metrics", ALICE, 200),
            ("/x", BOSS, 200),
            ("/x", ALICE, 503),
        ):
            client = stack.enter_context(closing(Client(server.port)))
            assert client.status(path, key) == status, path
        # Idle connections do not occupy the reserve either.
        taken = [stack.enter_context(closing(Client(server.port))) for _ in range(9)]
        assert taken[-1].status("/live") == 200
        busy[0].close()
        eventually(lambda: table.count <= 5 + 2, "closed connections still count")
        late = stack.enter_context(closing(Client(server.port)))
        eventually(lambda: late.status("/x", ALICE) in (200, 0), "there is a free slot again")


def test_the_limit_per_address_does_not_affect_others_and_can_be_turned_off() -> None:
    for per_address, answered in ((3, 503), (0, 200)):
        limits = ConnectionLimits(connections=20, per_address=per_address, reserved=4)
        with serving(limits) as (server, table), ExitStack() as stack:
            for client in opened(stack, server.port, 3):
                client.ask("/slow")
            eventually(lambda: not table._idle and table.count == 3, "their requests were not read")
            assert stack.enter_context(closing(Client(server.port))).status("/x") == answered
            assert stack.enter_context(closing(Client(server.port, "127.0.0.9"))).status("/x") == 200
            assert stack.enter_context(closing(Client(server.port))).status("/live") == 200


def test_addresses_of_one_host_are_counted_together() -> None:
    assert address_of(("2001:db8::1", 1)) == address_of(("2001:db8::ffff:2", 9))
    assert address_of(("2001:db8::1", 1)) != address_of(("2001:db8:0:1::1", 1))
    assert address_of(("::ffff:192.0.2.1", 1)) == address_of(("192.0.2.1", 2)) == "192.0.2.1"
    assert address_of(("fe80::1%eth0", 1)) == address_of(("fe80::2", 1))
    assert address_of(None) == "" and address_of(("::1", 1)) == "::1"


def test_limits_that_admit_no_connection_are_refused() -> None:
    for wrong in ({"connections": 0}, {"per_address": -1}):
        with pytest.raises(ConfigError, match="too low"):
            ConnectionLimits(**wrong)
    assert ConnectionLimits(connections=100).address_limit == 25 and ConnectionLimits(connections=2).address_limit == 1


def test_connections_are_limited_by_open_files() -> None:
    program = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))\n"
        "from bankfull.serve.guard.listen import raise_file_limit\n"
        "print(raise_file_limit(4000), resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < 5000:
        pytest.skip("the limit of open files is too low")
    for limits, connections, files in (((1024, 5000), 4000, 4576), ((256, 2048), 1472, 2048), ((100, 100), 25, 100)):
        command = [sys.executable, "-c", program, *map(str, limits)]
        made = subprocess.run(command, capture_output=True, text=True, check=True)
        assert made.stdout.split() == [str(connections), str(files)]
        assert ("limiting connections" in made.stderr) == (connections < 4000)


# -- clients that do not read


@pytest.mark.parametrize("path", ["/large", "/stream"])
def test_a_client_that_does_not_read_is_disconnected_and_its_data_dropped(path: str) -> None:
    limits = ConnectionLimits(read_seconds=0.8, unread_bytes=16 * LARGE)
    with serving(limits) as (server, table), ExitStack() as stack:
        clients = opened(stack, server.port, 8)
        for client in clients:
            client.ask(path)
        eventually(lambda: table.count == 8, "they have not connected")
        eventually(lambda: table.count == 0, "they are still connected")
        assert table.held == 0 and not table._sending
        for client in clients:
            assert client.rest() < LARGE


def test_unread_bytes_of_all_clients_are_bounded() -> None:
    limits = ConnectionLimits(read_seconds=600, unread_bytes=3 * LARGE)
    with serving(limits) as (server, table), ExitStack() as stack:
        most = 0
        clients = []
        for number in range(20):
            clients += opened(stack, server.port, 1)
            clients[-1].ask("/large")
            eventually(lambda: len(table._sending) >= min(number + 1, 3), "the request has not started")  # noqa: B023
            most = max(
                most,
                table.held,
                sum(one.held + one.unwritten for one in list(table._connections)),
            )
        assert LARGE < most <= 3 * LARGE + 20 * 2 * CHUNK_BYTES
        eventually(lambda: table.count <= 4, "clients with too many unread bytes were not disconnected")
        # A client that reads receives everything, however many others do not read.
        client = stack.enter_context(closing(Client(server.port)))
        client.socket.sendall(b"GET /large HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert client.rest() > LARGE


def test_a_slow_reader_is_not_disconnected() -> None:
    limits = ConnectionLimits(read_seconds=1.6, read_bytes=10_000)
    with serving(limits) as (server, _), closing(Client(server.port)) as client:
        client.socket.sendall(b"GET /large HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        count = 0
        for _ in range(20):
            time.sleep(0.2)
            count += len(client.socket.recv(100_000))
        assert count < LARGE, "it was not a slow reader"
        assert count + client.rest() > LARGE


def test_a_response_sent_in_chunks_is_unchanged() -> None:
    with serving(ConnectionLimits()) as (server, _):
        received = server.send(b"GET /large HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        head, _, body = received.partition(b"\r\n\r\n")
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
def test_connections_without_a_tls_handshake_have_the_same_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = made_certificate(tmp_path / "a", "first")
    limits = ConnectionLimits(connections=20, per_address=10, read_seconds=0.8)
    with (
        serving(limits, certificates=certificates_of(Tls(certificate, key))) as (server, table),
        ExitStack() as stack,
    ):
        silent = opened(stack, server.port, 60)
        eventually(lambda: sum(client.open() for client in silent) <= 10, "no connection was closed")
        client = stack.enter_context(closing(Client(server.port, wrap=trusting(certificate))))
        assert client.status("/live") == 200
        stuck = stack.enter_context(closing(Client(server.port, wrap=trusting(certificate))))
        stuck.ask("/large")
        eventually(lambda: table.held > 0, "the request has not started")
        eventually(lambda: table.held == 0, "data is still held for a client that does not read")
        assert stuck.rest() < LARGE
        monkeypatch.setattr("bankfull.serve.guard.listen.HEAD_SECONDS", 0.3)
        late = stack.enter_context(closing(Client(server.port)))
        late.socket.sendall(b"\x16\x03\x01")
        assert late.rest() == 0 and not late.open()


@NEEDS_OPENSSL
def test_a_replaced_certificate_is_used_for_new_connections(tmp_path: Path) -> None:
    certificate, key = made_certificate(tmp_path / "used", "first")
    second, second_key = made_certificate(tmp_path / "new", "second")
    certificates = certificates_of(Tls(certificate, key))
    assert certificates is not None

    def name(server: Listening, trusted: Path) -> str:
        with closing(Client(server.port, wrap=trusting(trusted))) as client:
            assert client.status("/live") == 200
            return dict(pair[0] for pair in client.socket.getpeercert()["subject"])["commonName"]

    with serving(ConnectionLimits(), certificates=certificates) as (server, _):
        with closing(Client(server.port, wrap=trusting(certificate))) as before:
            assert name(server, certificate) == "first"
            second.replace(certificate)
            certificates.reload()  # its key has not been replaced yet
            second_key.replace(key)
            certificates.reload()
            assert name(server, certificate) == "second"
            assert before.status("/live") == 200, "open connections stay"
        certificate.write_text("nonsense")
        certificates.reload()
        certificates.reload(force=True)
        with closing(socket.create_connection(("127.0.0.1", server.port), timeout=60)) as raw:
            shown = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            shown.check_hostname, shown.verify_mode = False, ssl.CERT_NONE
            with shown.wrap_socket(raw) as client:
                assert client.getpeercert(binary_form=True), "an invalid certificate changes nothing"


@NEEDS_OPENSSL
def test_a_key_with_a_password_is_refused_without_a_prompt(tmp_path: Path) -> None:
    certificate, key = made_certificate(tmp_path / "a", "first")
    locked = tmp_path / "locked.pem"
    command = ["openssl", "rsa", "-aes256", "-passout", "pass:secret", "-in", key, "-out", locked]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(ConfigError, match="cannot be used"):
        certificates_of(Tls(certificate, locked))
    assert certificates_of(Tls(certificate, locked, "secret")) is not None


def test_the_asyncio_event_loop_works_too() -> None:
    """The server uses uvloop, whose transports behave differently from asyncio's when data is written."""
    table = ConnectionTable(ConnectionLimits(read_seconds=0.8))
    access = access_policy(Keyring(), host="127.0.0.1")
    with (
        listening(Watch(Guard(app, access), ServiceMetrics()), connection_table=table, loop="asyncio") as server,
        closing(Client(server.port)) as client,
    ):
        assert client.status("/x") == 200
        client.ask("/large")
        eventually(lambda: table.held > 0, "the request has not started")
        eventually(lambda: table.count == 0, "a client that does not read is still connected")
    assert table.held == 0
