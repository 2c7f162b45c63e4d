"""The outer layers over a real socket, around an application that echoes what it received."""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bankfull.errors import ConfigError
from bankfull.serve.api.errors import Refusal, openai_error, problem_of
from bankfull.serve.console.pages import PAGES
from bankfull.serve.guard.checks import AccessPolicy, Guard, GuardLimits, access_policy, caller_named
from bankfull.serve.guard.keys import Keyring, new_key
from bankfull.serve.guard.tls import Tls, certificates_of
from bankfull.serve.telemetry.metrics import ServiceMetrics
from bankfull.serve.telemetry.trace import current_trace
from bankfull.serve.telemetry.watch import Watch
from tests.serve.listening import Listening, listening

web = httpx.Client(trust_env=False)
SECRET, KEY = new_key("alice", requests=1000)
FEW, FEW_KEY = new_key("bob", requests=2)
BOSS, BOSS_KEY = new_key("boss", admin=True)
LIMITS = GuardLimits(
    body_bytes=10_000,
    body_seconds=0.4,
    upload_bytes=50_000,
    upload_pause_seconds=0.4,
    header_count=20,
    header_bytes=4000,
    path_bytes=500,
)


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Responds with the size of the body and the caller."""
    size = 0
    try:
        while (message := await receive())["type"] == "http.request":
            size += len(message["body"])
            if not message["more_body"]:
                break
        trace = current_trace()
        body = json.dumps({"size": size, "key": trace.key.name if trace is not None and trace.key else None}).encode()
        status = 200
    except Refusal as refusal:
        problem = problem_of(refusal)
        body, status = openai_error(problem), problem.status
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def guarded(access: AccessPolicy) -> Any:
    return Watch(Guard(echo, access, LIMITS), ServiceMetrics())


@pytest.fixture(scope="module")
def open_server() -> Iterator[Listening]:
    access = access_policy(Keyring(), host="127.0.0.1", hosts=["api.example.org"], origins=["https://app.example.org"])
    with listening(guarded(access)) as server:
        yield server


@pytest.fixture(scope="module")
def locked_server() -> Iterator[Listening]:
    with listening(guarded(access_policy(Keyring((KEY, FEW_KEY, BOSS_KEY)), host="0.0.0.0"))) as server:
        yield server


def error_of(answer: httpx.Response) -> dict[str, Any]:
    body = answer.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


def test_every_route_but_probes_and_the_pages_of_the_console_needs_a_key(locked_server: Listening) -> None:
    for path in (
        "/v1/chat/completions",
        "/metrics",
        "/health",
        "/openapi.json",
        "/nowhere",
        "/live/../metrics",
        "//live",
    ):
        answer = web.post(locked_server.url + path)
        assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer", path
        assert error_of(answer)["code"] == "missing_api_key"
    for path in ("/live", "/ready", *PAGES):
        assert web.get(locked_server.url + path).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {SECRET}"},
        {"authorization": f"bearer  {SECRET}"},
        {"x-api-key": SECRET},
        {"authorization": f"Bearer {SECRET}", "x-api-key": SECRET},
    ],
)
def test_a_key_is_accepted_in_both_headers(locked_server: Listening, headers: dict[str, str]) -> None:
    answer = web.post(locked_server.url + "/x", headers=headers, content=b"abc")
    assert answer.json() == {"size": 3, "key": "alice"}


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"Basic " + SECRET.encode())],
        [(b"authorization", SECRET.encode())],
        [(b"authorization", b"Bearer " + SECRET.encode() + b"x")],
        [(b"x-api-key", SECRET.upper().encode())],
        [(b"x-api-key", KEY.digest.encode())],
        [(b"x-api-key", b"alice")],
        [(b"authorization", b"Bearer " + SECRET.encode()), (b"x-api-key", FEW.encode())],
        # A full-width letter, a look-alike, a zero-width space and an invalid UTF-8 byte make a different key.
        [(b"x-api-key", "\uff42\uff46".encode() + SECRET[2:].encode())],
        [(b"x-api-key", SECRET.encode() + "\u200b".encode())],
        [(b"x-api-key", SECRET.encode() + b"\xff")],
        [(b"x-api-key", ("b\u0560" + SECRET[2:]).encode())],
    ],
)
def test_a_wrong_key_is_refused(locked_server: Listening, headers: list[tuple[bytes, bytes]]) -> None:
    answer = web.post(locked_server.url + "/x", headers=headers)
    assert answer.status_code == 401
    assert SECRET not in answer.text and error_of(answer)["type"] == "authentication_error"


def test_a_repeated_header_is_refused(locked_server: Listening) -> None:
    twice = [(b"authorization", b"Bearer x"), (b"authorization", b"Bearer " + SECRET.encode())]
    assert web.post(locked_server.url + "/x", headers=twice).status_code == 400


def test_a_key_above_its_rate_limit_gets_429(locked_server: Listening) -> None:
    codes = [web.get(locked_server.url + "/x", headers={"x-api-key": FEW}) for _ in range(4)]
    assert [answer.status_code for answer in codes] == [200, 200, 429, 429]
    assert 1 <= int(codes[-1].headers["retry-after"]) <= 60
    assert error_of(codes[-1])["type"] == "rate_limit_error"
    assert web.get(locked_server.url + "/x", headers={"x-api-key": SECRET}).status_code == 200


def test_a_new_key_under_an_old_name_has_another_salt_and_reveals_nothing(tmp_path: Path) -> None:
    file, now = tmp_path / "keys", [0.0]
    secrets, keys = zip(*(new_key("alice") for _ in range(2)), strict=True)
    file.write_text(keys[0].line)
    access = access_policy(Keyring(file=file, clock=lambda: now[0]), host="127.0.0.1")
    old = caller_named(access, "alice")
    file.write_text(keys[1].line)
    os.utime(file, ns=(1, 1))
    now[0] += 60
    new = caller_named(access, "alice")
    assert old.key == new.key == "alice" and old.salt and new.salt and old.salt != new.salt
    assert new == caller_named(access, "alice", keys[1])
    for caller, secret, key in zip((old, new), secrets, keys, strict=True):
        told = {secret[i : i + 8] for i in range(len(secret) - 7)} | {key.digest[i : i + 8] for i in range(57)}
        assert not any(part in caller.salt for part in told)
    shared = access_policy(access.keyring, host="127.0.0.1", share_prefixes=True)
    assert caller_named(shared, "alice").salt == "" == caller_named(access, "").salt
    file.write_text("")
    os.utime(file, ns=(2, 2))
    now[0] += 60
    assert caller_named(access, "alice").salt not in ("", old.salt, new.salt), "what still runs shares nothing"


def test_only_an_admin_key_may_reset_the_prefix_cache(locked_server: Listening) -> None:
    for secret, status in ((SECRET, 403), (BOSS, 200)):
        answer = web.post(locked_server.url + "/reset_prefix_cache", headers={"x-api-key": secret})
        assert answer.status_code == status


@pytest.mark.parametrize(
    "host", ["evil.example.com", "127.0.0.1.evil.com", "localhost.evil.com:80", "", "[::1", "a@localhost"]
)
def test_a_foreign_host_is_refused(open_server: Listening, host: str) -> None:
    answer = web.get(open_server.url + "/x", headers={"host": host})
    assert answer.status_code == 421 and error_of(answer)["code"] == "unknown_host"


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000", "[::1]", "api.example.org"]
)
def test_the_names_of_the_server_are_accepted(open_server: Listening, host: str) -> None:
    assert web.get(open_server.url + "/x", headers={"host": host}).status_code == 200


def test_a_request_without_host_is_refused(open_server: Listening) -> None:
    assert open_server.send(b"GET /x HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 421")


def test_a_request_of_a_foreign_origin_is_refused(open_server: Listening) -> None:
    for origin in ("https://evil.example.com", "null", "http://app.example.org", "https://app.example.org.evil.com"):
        answer = web.post(open_server.url + "/x", headers={"origin": origin}, content=b"{}")
        assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers
    assert web.options(open_server.url + "/x", headers={"origin": "https://evil.example.com"}).status_code == 403
    assert web.post(open_server.url + "/x", headers={"origin": open_server.url}).status_code == 200, "our own page"


def test_an_allowed_origin_gets_cors_headers(open_server: Listening) -> None:
    origin = {"origin": "https://app.example.org"}
    ahead = web.options(open_server.url + "/x", headers=origin | {"access-control-request-headers": "x-api-key"})
    assert ahead.status_code == 204 and ahead.headers["access-control-allow-headers"] == "x-api-key"
    answer = web.post(open_server.url + "/x", headers=origin)
    assert answer.headers["access-control-allow-origin"] == origin["origin"]
    assert "access-control-allow-credentials" not in answer.headers
    assert "access-control-allow-origin" not in web.post(open_server.url + "/x").headers


def test_a_body_is_limited_by_content_length_and_while_it_arrives(open_server: Listening) -> None:
    assert web.post(open_server.url + "/x", content=b"x" * 10_000).json()["size"] == 10_000
    announced = web.post(open_server.url + "/x", content=b"x" * 10_001)
    chunked = web.post(open_server.url + "/x", content=iter([b"x" * 6000, b"x" * 6000]))
    for answer in (announced, chunked):
        assert answer.status_code == 413 and error_of(answer)["code"] == "request_too_large"
    for length in (b"-1", b"+5", b"1_0", b"9" * 16):
        request = b"POST /x HTTP/1.1\r\nhost: localhost\r\ncontent-length: " + length + b"\r\n\r\nx"
        assert open_server.send(request).startswith((b"HTTP/1.1 400", b"HTTP/1.1 413"))


def test_a_slow_body_times_out(open_server: Listening) -> None:
    request = b"POST /x HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n" + b"x" * 20
    assert open_server.send(request).startswith(b"HTTP/1.1 408")


def test_an_upload_is_streamed_and_limited(open_server: Listening) -> None:
    assert web.post(open_server.url + "/v1/files", content=iter([b"x" * 20_000] * 2)).json()["size"] == 40_000
    assert web.post(open_server.url + "/v1/files", content=iter([b"x" * 20_000] * 3)).status_code == 413
    head = b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 100\r\n\r\n"
    assert open_server.send(head + b"x" * 20).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "gzip, identity", "x-gzip"])
def test_compressed_bodies_are_refused(open_server: Listening, encoding: str) -> None:
    assert web.post(open_server.url + "/x", headers={"content-encoding": encoding}, content=b"x").status_code == 415


def test_headers_and_urls_are_limited(open_server: Listening) -> None:
    many = {f"x-{number}": "1" for number in range(30)}
    assert web.get(open_server.url + "/x", headers=many).status_code == 431
    assert web.get(open_server.url + "/x", headers={"x-long": "a" * 5000}).status_code == 431
    assert web.get(open_server.url + "/" + "a" * 600).status_code == 414


def test_an_endless_head_is_refused(open_server: Listening) -> None:
    answer = open_server.send(b"GET /x HTTP/1.1\r\nhost: localhost\r\nx-long: " + b"a" * 200_000)
    assert answer.startswith(b"HTTP/1.1 431") or answer == b""
    assert web.get(open_server.url + "/x").status_code == 200


def test_a_slow_head_times_out(open_server: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bankfull.serve.guard.listen.HEAD_SECONDS", 0.3)
    answer = open_server.send(b"GET /x HTTP/1.1\r\nhost: loc")
    assert answer.startswith(b"HTTP/1.1 408") and json.loads(answer.split(b"\r\n\r\n")[1])["error"]["message"]


def test_invalid_http_gets_a_json_error(open_server: Listening) -> None:
    answer = open_server.send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400") and json.loads(answer.split(b"\r\n\r\n")[1])["error"]["type"]


@pytest.mark.parametrize("given", ["abc", "A.b_c-9", "x" * 64])
def test_a_good_request_id_is_echoed(open_server: Listening, given: str) -> None:
    assert web.get(open_server.url + "/x", headers={"x-request-id": given}).headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "a b", "x" * 65, "a/b", "é".encode(), b"a\tb"])
def test_any_other_request_id_is_replaced(open_server: Listening, given: str | bytes) -> None:
    made = web.get(open_server.url + "/x", headers={"x-request-id": given}).headers["x-request-id"]
    assert made.startswith("req-") and len(made) == 28


def test_listening_beyond_loopback_needs_keys_or_no_auth() -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org", ""):
        with pytest.raises(ConfigError, match="--no-auth"):
            access_policy(Keyring(), host=host)
        access_policy(Keyring(), host=host, no_auth=True)
        access_policy(Keyring((KEY,)), host=host)
    for host in ("127.0.0.1", "::1", "localhost", "127.8.8.8"):
        access_policy(Keyring(), host=host)
    with pytest.raises(ConfigError, match="contradicts"):
        access_policy(Keyring((KEY,)), host="127.0.0.1", no_auth=True)
    with pytest.raises(ConfigError, match="origin"):
        access_policy(Keyring(), host="127.0.0.1", origins=["app.example.org"])


def test_hosts_are_checked_when_no_key_is_required() -> None:
    assert "*" not in access_policy(Keyring(), host="0.0.0.0", no_auth=True).hosts
    assert "*" in access_policy(Keyring((KEY,)), host="0.0.0.0").hosts
    assert "*" not in access_policy(Keyring((KEY,)), host="0.0.0.0", hosts=["api.example.org"]).hosts


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_tls(tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate]
    subprocess.run([*command, *subject], check=True, capture_output=True)
    certificates = certificates_of(Tls(certificate, key))
    with listening(guarded(access_policy(Keyring(), host="127.0.0.1")), certificates=certificates) as server:
        with httpx.Client(verify=ssl.create_default_context(cafile=certificate)) as trusting:
            assert trusting.get(f"https://localhost:{server.port}/x").status_code == 200
        with pytest.raises(httpx.HTTPError):
            web.get(f"http://localhost:{server.port}/x")
    for broken in (Tls(key, certificate), Tls(tmp_path / "none.pem"), Tls(key=key), Tls(certificate)):
        with pytest.raises(ConfigError, match=r"(?i)tls"):
            certificates_of(broken)
