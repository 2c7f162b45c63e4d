"""Checks on every request before an endpoint handles it: the Host header is ours (DNS rebinding), the Origin is allowed
(CSRF), the body is of bounded size and arrives in bounded time, and the API key is valid.

This is a plain ASGI layer. It reads the whole body of a call after checking the key, and passes on only uploads as they
arrive. So no endpoint waits for a slow sender, and clients without a key fill no memory.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from bankfull.errors import BankfullError, ConfigError
from bankfull.serve.api.calls import CALLER, ON_RESERVE, Api, Caller, spelled_at
from bankfull.serve.api.errors import Problem, Refusal, problem_of
from bankfull.serve.console.pages import PAGES, STATE_PATH, TABLES_PATH
from bankfull.serve.guard.keys import Key, Keyring
from bankfull.serve.telemetry.trace import Running, current_trace, why_ended

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

OPEN_PATHS = frozenset({"/live", "/ready", *PAGES})
UNCHARGED_PATHS = frozenset({STATE_PATH, TABLES_PATH})
"""Paths that are not charged to the key's rate limit: these are cheap, and an open console requests them every
second."""
ADMIN_PATHS = frozenset({"/reset_prefix_cache"})
PROBES = frozenset({"/live", "/ready", "/health", "/metrics"})
"""Paths that are also served on connections of the reserve."""
UPLOAD_PATH = "/v1/files"
DRAIN_SECONDS = 2.0
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
ANY = "*"
# CORS headers for allowed origins. Credentials are never allowed: API keys travel in headers.
_CORS_METHODS = b"GET, POST, DELETE, OPTIONS"
_CORS_EXPOSED = b"x-request-id, retry-after, x-response-cache"
_CORS_SECONDS = b"600"


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardLimits:
    body_bytes: int = 32 << 20
    body_seconds: float = 30.0
    upload_bytes: int = 520 << 20
    upload_seconds: float = 1800.0
    upload_pause_seconds: float = 30.0
    """Longest pause between two parts of an upload."""
    waiting_bytes: int = 512 << 20
    """Bytes of all bodies that are being read at the same time."""
    header_count: int = 100
    header_bytes: int = 32 << 10
    path_bytes: int = 8 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessPolicy:
    """Which keys, hosts and origins may call the server."""

    keyring: Keyring
    hosts: frozenset[str]
    """Allowed names in the Host header; ANY turns the check off."""
    origins: frozenset[str] = frozenset()
    """Origins of web pages that may call the server, such as https://app.example.org; none by default."""
    share_prefixes: bool = False
    """Whether keys share the prefix cache. A key can then learn from response times what prompts other keys have
    sent."""


def access_policy(
    keyring: Keyring,
    *,
    host: str,
    no_auth: bool = False,
    hosts: Iterable[str] = (),
    origins: Iterable[str] = (),
    share_prefixes: bool = False,
) -> AccessPolicy:
    """Build the policy, and refuse a combination that opens the server by accident."""
    if not keyring.required and not no_auth and not is_loopback(host):
        raise ConfigError(
            f"{host or 'Every address'} can be reached from other machines; pass --api-key-file, set "
            "BANKFULL_API_KEY, or pass --no-auth to allow everyone."
        )
    if keyring.required and no_auth:
        raise ConfigError("--no-auth contradicts the configured API keys; remove one of them.")
    known = {name.lower() for name in (*LOOPBACK_NAMES, *hosts)}
    if not is_wildcard(host):
        known.add(f"[{host}]" if ":" in host else host.lower())
    elif keyring.required and not hosts:
        # DNS rebinding gains nothing where a key is required, and a server on all interfaces has many names.
        known.add(ANY)
    for origin in origins:
        if origin != ANY and not origin.startswith(("http://", "https://")):
            raise ConfigError(
                f"The origin {origin[:80]!r} is not valid; use the form https://app.example.org, without a path."
            )
    return AccessPolicy(
        keyring=keyring,
        hosts=frozenset(known),
        origins=frozenset(origin.lower().rstrip("/") for origin in origins),
        share_prefixes=share_prefixes,
    )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return host == ""


def caller_named(access: AccessPolicy, name: str, key: Key | None = None) -> Caller:
    """The caller that uses the key with this name now; "" if no key is required. `key`: the one that was presented."""
    key = key or (access.keyring.named(name) if name else None)
    salt = name if key is None else key.salt  # no key has a name as its salt
    return Caller(name or None, "" if access.share_prefixes else salt)


class Guard:
    def __init__(
        self,
        app: App,
        access: AccessPolicy,
        limits: GuardLimits | None = None,
        *,
        apis: Mapping[str, Api] | None = None,
        keep_bodies: bool = False,
        running: Running | None = None,
    ) -> None:
        """`apis`, by path, format errors in their own style. `running` holds the calls in flight."""
        self._running = Running() if running is None else running
        self._app, self._access, self._limits = app, access, limits or GuardLimits()
        self._apis, self._keep_bodies = apis or {}, keep_bodies
        self._waiting = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        try:
            allowed = self._check_head(scope)
            if allowed is not None:
                send = _add_cors_headers(allowed, send)
            if scope["method"] == "OPTIONS" and allowed is not None:
                return await _answer_preflight(scope, send)
            self._check_key(scope)
            await self._serve(scope, receive, send)
        except Rejected as refused:
            body = spelled_at(self._apis, scope["path"], refused.problem)
            await _refuse(refused, body, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request by the application, unless the server ends the call early."""
        trace, task = current_trace(), asyncio.current_task()
        with self._running.during(task, trace):
            try:
                if _is_upload(scope):
                    upload = UploadStream(self._limits, receive, send)
                    receive, send = upload.receive, upload.send
                else:
                    receive = await self._read_body(scope, receive)
                await self._app(scope, receive, send)
            except asyncio.CancelledError:
                if task is not None:
                    task.uncancel()
                if trace is None or not trace.status:
                    raise Rejected.because(why_ended()) from None
                # A stream has sent its last event. Any other response is incomplete, so the server closes the
                # connection.

    # -- the head

    def _check_head(self, scope: Scope) -> bytes | None:
        """Check the head, and return the origin that CORS headers must allow, if any."""
        limits, headers = self._limits, scope["headers"]
        if len(headers) > limits.header_count:
            raise Rejected(431, f"The request has {len(headers)} headers; send at most {limits.header_count}.")
        if sum(len(name) + len(value) for name, value in headers) > limits.header_bytes:
            raise Rejected(431, f"The headers of the request have more than {limits.header_bytes} bytes; send fewer.")
        if len(scope["raw_path"]) + len(scope["query_string"]) > limits.path_bytes:
            raise Rejected(414, f"The URL has more than {limits.path_bytes} bytes; send parameters in the body.")
        self._check_host(_single(headers, b"host"))
        encoding = _single(headers, b"content-encoding")
        if encoding is not None and encoding.strip().lower() != b"identity":
            raise Rejected(415, "Compressed request bodies are not supported; send the body without Content-Encoding.")
        return self._check_origin(_single(headers, b"origin"), _single(headers, b"host"), scope["scheme"])

    def _check_host(self, host: bytes | None) -> None:
        if ANY in self._access.hosts:
            return
        if host is None or _without_port(host.decode("latin-1").lower()) not in self._access.hosts:
            raise Rejected(
                421,
                "The name in the Host header is not a name of this server; start it with --allowed-host NAME to "
                "allow it.",
                code="unknown_host",
            )

    def _check_origin(self, origin: bytes | None, host: bytes | None, scheme: str) -> bytes | None:
        if origin is None:
            return None
        page = origin.decode("latin-1").lower()
        if page in self._access.origins or ANY in self._access.origins:
            return origin
        if host is not None and page == f"{scheme}://{host.decode('latin-1').lower()}":
            return None
        raise Rejected(
            403,
            "Web pages of this origin may not call this server; start it with --cors-origin ORIGIN to allow them.",
            code="origin_not_allowed",
        )

    # -- the key

    def _check_key(self, scope: Scope) -> None:
        keyring, path = self._access.keyring, scope["path"]
        if not keyring.required or path in OPEN_PATHS:
            return _check_reserve(scope, admin=False)
        presented = _presented_key(scope["headers"])
        if presented is None:
            raise Rejected(
                401,
                "No API key was sent; send one as `Authorization: Bearer KEY` or as `x-api-key: KEY`.",
                code="missing_api_key",
            )
        key = keyring.find(presented)
        if key is None:
            raise Rejected(401, "The API key is not valid on this server.", code="invalid_api_key")
        trace = current_trace()
        if trace is not None:
            trace.key = key
        scope[CALLER] = caller_named(self._access, key.name, key)
        _check_reserve(scope, admin=key.admin)
        if path in ADMIN_PATHS and not key.admin:
            raise Rejected(403, f"The key {key.name} may not do this: its line in the key file has no `admin`.")
        if path not in UNCHARGED_PATHS:
            self._check_rate_limit(key)

    def _check_rate_limit(self, key: Key) -> None:
        limits = self._access.keyring.rate_limits(key)
        for bucket, what in ((limits.requests, "requests"), (limits.tokens, "tokens")):
            if bucket is not None and (seconds := bucket.wait()) > 0:
                raise Rejected(
                    429,
                    f"The key {key.name} has used its {bucket.per_minute} {what} per minute; try again in "
                    f"{seconds:.1f} s.",
                    code="rate_limit_exceeded",
                    retry_after=seconds,
                )
        if limits.requests is not None:
            limits.requests.take(1)

    # -- the body

    async def _read_body(self, scope: Scope, receive: Receive) -> Receive:
        limits = self._limits
        self._check_length(scope["headers"], limits.body_bytes)
        pieces: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        return _replay(message, receive)
                    piece = message.get("body", b"")
                    pieces.append(piece)
                    size += len(piece)
                    self._waiting += len(piece)
                    more = message.get("more_body", False)
                    if size > limits.body_bytes:
                        raise _too_large(limits.body_bytes, unread=more)
                    if self._waiting > limits.waiting_bytes:
                        raise Rejected(
                            429,
                            "The server is reading too many other request bodies; try again later.",
                            code="rate_limit_exceeded",
                            retry_after=1.0,
                            unread=more,
                        )
                    if not more:
                        break
        except TimeoutError:
            raise _too_slow(limits.body_seconds) from None
        finally:
            self._waiting -= size
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        trace = current_trace()
        if self._keep_bodies and trace is not None:
            trace.body = body
        return _replay({"type": "http.request", "body": body, "more_body": False}, receive)

    def _check_length(self, headers: Headers, most: int) -> None:
        length = _single(headers, b"content-length")
        if length is None:
            return
        if not length.isdigit() or len(length) > 15:
            raise Rejected(400, "The Content-Length header is not a valid number of bytes.")
        if int(length) > most:
            raise _too_large(most)


class UploadStream:
    """An upload that is passed on as it arrives; its endpoint reports errors raised here to the client. If the response
    is sent before the upload ends, the rest is read and dropped, because most clients read the response only after
    sending everything."""

    def __init__(self, limits: GuardLimits, receive: Receive, send: Send) -> None:
        self._limits, self._receive, self._send = limits, receive, send
        self._size = 0
        self._ends = asyncio.get_running_loop().time() + limits.upload_seconds
        self._complete = False

    async def receive(self) -> Message:
        if self._complete:
            return await self._receive()
        limits = self._limits
        left = min(limits.upload_pause_seconds, self._ends - asyncio.get_running_loop().time())
        try:
            async with asyncio.timeout(max(0.0, left)):
                message = await self._receive()
        except TimeoutError:
            raise Refusal("The upload arrived too slowly; send it again.", code="request_timeout", status=408) from None
        self._size += len(message.get("body", b""))
        self._complete = not message.get("more_body", False)
        if self._size > limits.upload_bytes:
            raise Refusal(
                f"The upload has more than {limits.upload_bytes} bytes; send a smaller one.",
                code="request_too_large",
                status=413,
            )
        return message

    async def send(self, message: Message) -> None:
        if self._complete:
            await self._send(message)
        elif message["type"] == "http.response.start":
            await self._send({**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]})
        elif message.get("more_body", False):
            await self._send(message)
        else:
            await self._send({**message, "more_body": True})
            with suppress(TimeoutError):
                async with asyncio.timeout(self._limits.upload_pause_seconds):
                    while (await self._receive()).get("more_body", False):
                        pass
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})


class Rejected(Exception):
    """Ends a request in this layer. `unread` means that more of its body may arrive."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        retry_after: float | None = None,
        unread: bool = True,
    ) -> None:
        super().__init__(message)
        self.problem = Problem(status, message, _TYPES.get(status, "invalid_request_error"), None, code, retry_after)
        self.unread = unread

    @classmethod
    def because(cls, error: BankfullError) -> Rejected:
        """A rejection with the response that the error gets in any other layer."""
        refused = cls(500, str(error), unread=False)
        refused.problem = problem_of(error)
        return refused


_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 503: "server_error"}


def _too_large(most: int, unread: bool = True) -> Rejected:
    message = f"The body of the request has more than {most} bytes; send a smaller one."
    return Rejected(413, message, code="request_too_large", unread=unread)


def _too_slow(seconds: float) -> Rejected:
    return Rejected(408, f"The body of the request did not arrive within {seconds:g} seconds.", code="request_timeout")


async def _refuse(refused: Rejected, body: bytes, receive: Receive, send: Send) -> None:
    """Send the response and close the connection. Many clients read a response only after sending everything, and lose
    it if the connection closes earlier, so their data is drained for a moment."""
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
        *refused.problem.headers,
    ]
    await send({"type": "http.response.start", "status": refused.problem.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_SECONDS):
            while refused.unread:
                refused.unread = (await receive()).get("more_body", False)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _answer_preflight(scope: Scope, send: Send) -> None:
    wanted = _single(scope["headers"], b"access-control-request-headers") or b"authorization, content-type"
    headers = [
        (b"access-control-allow-methods", _CORS_METHODS),
        (b"access-control-allow-headers", wanted),
        (b"access-control-max-age", _CORS_SECONDS),
        (b"content-length", b"0"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def _add_cors_headers(origin: bytes, send: Send) -> Send:
    """Add the CORS headers that let the page read the response."""

    async def telling(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [
                *message.get("headers", ()),
                (b"access-control-allow-origin", origin),
                (b"vary", b"origin"),
                (b"access-control-expose-headers", _CORS_EXPOSED),
            ]
        await send(message)

    return telling


def _replay(first: Message, then: Receive) -> Receive:
    replayed = False

    async def receive() -> Message:
        nonlocal replayed
        if replayed:
            return await then()
        replayed = True
        return first

    return receive


def _check_reserve(scope: Scope, *, admin: bool) -> None:
    if scope.get(ON_RESERVE) and not admin and scope["path"] not in PROBES:
        raise Rejected(
            503,
            "The server or your address has reached its connection limit; try again later, or reuse an open "
            "connection.",
            code="too_many_connections",
            retry_after=1.0,
        )


def _is_upload(scope: Scope) -> bool:
    return scope["method"] == "POST" and scope["path"].rstrip("/") == UPLOAD_PATH


def _single(headers: Headers, name: bytes) -> bytes | None:
    """The value of a header, or None. A repeated header is refused, because programs disagree on which value counts."""
    values = [value for key, value in headers if key == name]
    if len(values) > 1:
        raise Rejected(400, f"The header {name.decode()} is given {len(values)} times; send it once.")
    return values[0] if values else None


def _presented_key(headers: Headers) -> bytes | None:
    authorization, plain = _single(headers, b"authorization"), _single(headers, b"x-api-key")
    bearer = None
    if authorization is not None:
        scheme, _, value = authorization.partition(b" ")
        bearer = value.strip(b" ") if scheme.lower() == b"bearer" else None
    if bearer and plain and bearer != plain:
        raise Rejected(401, "The request has two different API keys; send one.", code="invalid_api_key")
    return bearer or plain


def _without_port(host: str) -> str:
    """The host without its port. An IPv6 address ends at its bracket; its colons start no port."""
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() and (not host.startswith("[") or name.endswith("]")) else host
