"""What a request must be like before any endpoint sees it: for us (Host), not from a stranger's web page (Origin), of a
bounded size that arrives in bounded time, and from somebody who may ask (keys).

A layer of plain ASGI. The body of a call is read here, whole, after its key was checked; only uploads are passed on as
they come. So no endpoint ever waits for a slow sender, and strangers fill no memory.
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
from bankfull.serve.console.pages import PAGES, STATE_PATH
from bankfull.serve.guard.keys import Key, Keyring
from bankfull.serve.guard.running import Running
from bankfull.serve.telemetry.trace import current_trace, why_ended

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

OPEN_PATHS = frozenset({"/live", "/ready", *PAGES})
UNCHARGED_PATHS = frozenset({STATE_PATH})
"""Cheap, and asked every second by whoever has the console open: that must not use up what a key may ask."""
ADMIN_PATHS = frozenset({"/reset_prefix_cache"})
PROBES = frozenset({"/live", "/ready", "/health", "/metrics"})
"""Answered on a connection of the reserve, too."""
UPLOAD_PATH = "/v1/files"
LINGER_SECONDS = 2.0
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
ANY = "*"
# What a browser may be told of an allowed origin's request. Credentials are never among it: keys travel in headers.
_CORS_METHODS = b"GET, POST, DELETE, OPTIONS"
_CORS_EXPOSED = b"x-request-id, retry-after"
_CORS_SECONDS = b"600"


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardLimits:
    body_bytes: int = 32 << 20
    body_seconds: float = 30.0
    upload_bytes: int = 520 << 20
    upload_seconds: float = 1800.0
    upload_pause_seconds: float = 30.0
    """Between two pieces of an upload."""
    waiting_bytes: int = 512 << 20
    """Of all bodies together that are being read."""
    header_count: int = 100
    header_bytes: int = 32 << 10
    path_bytes: int = 8 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Doors:
    """Who may come in, and from where."""

    keyring: Keyring
    hosts: frozenset[str]
    """Names that a Host header may have; with ANY in it, it is not looked at."""
    origins: frozenset[str] = frozenset()
    """Web pages that may call us, such as https://app.example.org; none by default."""
    share_prefixes: bool = False
    """One key's requests may be quicker for what another key's have left in the cache, which tells it about them."""


def open_doors(
    keyring: Keyring,
    *,
    host: str,
    no_auth: bool = False,
    hosts: Iterable[str] = (),
    origins: Iterable[str] = (),
    share_prefixes: bool = False,
) -> Doors:
    """Checks that nobody opens more than they meant to."""
    if not keyring.required and not no_auth and not is_loopback(host):
        raise ConfigError(
            f"{host or 'Every address'} can be reached from other machines; give --api-key-file, set BANKFULL_API_KEY, "
            "or say --no-auth to let everybody in."
        )
    if keyring.required and no_auth:
        raise ConfigError("--no-auth contradicts the API keys that are given; leave one of them out.")
    known = {name.lower() for name in (*LOOPBACK_NAMES, *hosts)}
    if not is_wildcard(host):
        known.add(f"[{host}]" if ":" in host else host.lower())
    elif keyring.required and not hosts:
        # A page that tricks a browser into asking us has no key; and who listens everywhere has many names.
        known.add(ANY)
    for origin in origins:
        if origin != ANY and not origin.startswith(("http://", "https://")):
            raise ConfigError(f"The origin {origin[:80]!r} must be like https://app.example.org, without a path.")
    return Doors(
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


def caller_named(doors: Doors, key: str) -> Caller:
    """Whoever has the key with this name; "" where nobody needs one."""
    return Caller(key or None, "" if doors.share_prefixes else key)


class Guard:
    def __init__(
        self,
        app: App,
        doors: Doors,
        limits: GuardLimits | None = None,
        *,
        apis: Mapping[str, Api] | None = None,
        keep_bodies: bool = False,
        running: Running | None = None,
    ) -> None:
        """`apis`, by path, spell errors in their own way. Calls are `running` while they are answered."""
        self._running = Running() if running is None else running
        self._app, self._doors, self._limits = app, doors, limits or GuardLimits()
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
                send = _telling(allowed, send)
            if scope["method"] == "OPTIONS" and allowed is not None:
                return await _answer_preflight(scope, send)
            self._check_key(scope)
            await self._served(scope, receive, send)
        except Refused as refused:
            body = spelled_at(self._apis, scope["path"], refused.problem)
            await _refuse(refused, body, receive, send)

    async def _served(self, scope: Scope, receive: Receive, send: Send) -> None:
        """By the application, unless the server ends it before."""
        trace, task = current_trace(), asyncio.current_task()
        with self._running.during(task, trace):
            try:
                if _uploads(scope):
                    upload = Upload(self._limits, receive, send)
                    receive, send = upload.receive, upload.send
                else:
                    receive = await self._whole_body(scope, receive)
                await self._app(scope, receive, send)
            except asyncio.CancelledError:
                if task is not None:
                    task.uncancel()
                if trace is None or not trace.status:
                    raise Refused.told(why_ended()) from None
                # A stream has had its last event; of any other answer the rest is missing, so the server closes it.

    # -- the head

    def _check_head(self, scope: Scope) -> bytes | None:
        """The origin that the answer may be told to, where there is one."""
        limits, headers = self._limits, scope["headers"]
        if len(headers) > limits.header_count:
            raise Refused(431, f"The request has {len(headers)} headers; send at most {limits.header_count}.")
        if sum(len(name) + len(value) for name, value in headers) > limits.header_bytes:
            raise Refused(431, f"The request's headers have more than {limits.header_bytes} bytes; send fewer.")
        if len(scope["raw_path"]) + len(scope["query_string"]) > limits.path_bytes:
            raise Refused(414, f"The address has more than {limits.path_bytes} bytes; send parameters in the body.")
        self._check_host(_only(headers, b"host"))
        encoding = _only(headers, b"content-encoding")
        if encoding is not None and encoding.strip().lower() != b"identity":
            raise Refused(415, "Compressed request bodies are not accepted; send the body as it is.")
        return self._check_origin(_only(headers, b"origin"), _only(headers, b"host"), scope["scheme"])

    def _check_host(self, host: bytes | None) -> None:
        if ANY in self._doors.hosts:
            return
        if host is None or _without_port(host.decode("latin-1").lower()) not in self._doors.hosts:
            raise Refused(
                421,
                "This server does not go by the name in the request's Host header; start it with --allowed-host "
                "NAME if it should.",
                code="unknown_host",
            )

    def _check_origin(self, origin: bytes | None, host: bytes | None, scheme: str) -> bytes | None:
        if origin is None:
            return None
        page = origin.decode("latin-1").lower()
        if page in self._doors.origins or ANY in self._doors.origins:
            return origin
        if host is not None and page == f"{scheme}://{host.decode('latin-1').lower()}":
            return None
        raise Refused(
            403,
            "Web pages of this origin may not call this server; start it with --cors-origin ORIGIN if they should.",
            code="origin_not_allowed",
        )

    # -- the key

    def _check_key(self, scope: Scope) -> None:
        keyring, path = self._doors.keyring, scope["path"]
        if not keyring.required or path in OPEN_PATHS:
            return _check_reserve(scope, admin=False)
        presented = _presented(scope["headers"])
        if presented is None:
            raise Refused(
                401,
                "No API key was given; send one as `Authorization: Bearer KEY` or as `x-api-key: KEY`.",
                code="missing_api_key",
            )
        key = keyring.find(presented)
        if key is None:
            raise Refused(401, "The API key is not one of this server's.", code="invalid_api_key")
        trace = current_trace()
        if trace is not None:
            trace.key = key
        scope[CALLER] = caller_named(self._doors, key.name)
        _check_reserve(scope, admin=key.admin)
        if path in ADMIN_PATHS and not key.admin:
            raise Refused(403, f"The key {key.name} may not do this: its line in the key file lacks `admin`.")
        if path not in UNCHARGED_PATHS:
            self._spend(key)

    def _spend(self, key: Key) -> None:
        allowance = self._doors.keyring.allowance(key)
        for bucket, what in ((allowance.requests, "requests"), (allowance.tokens, "tokens")):
            if bucket is not None and (seconds := bucket.wait()) > 0:
                raise Refused(
                    429,
                    f"The key {key.name} has used its {bucket.per_minute} {what} per minute; try again in "
                    f"{seconds:.1f} s.",
                    code="rate_limit_exceeded",
                    retry_after=seconds,
                )
        if allowance.requests is not None:
            allowance.requests.take(1)

    # -- the body

    async def _whole_body(self, scope: Scope, receive: Receive) -> Receive:
        limits = self._limits
        self._check_length(scope["headers"], limits.body_bytes)
        pieces: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        return _saying(message, receive)
                    piece = message.get("body", b"")
                    pieces.append(piece)
                    size += len(piece)
                    self._waiting += len(piece)
                    more = message.get("more_body", False)
                    if size > limits.body_bytes:
                        raise _too_large(limits.body_bytes, unread=more)
                    if self._waiting > limits.waiting_bytes:
                        raise Refused(
                            429,
                            "Too many bytes of other requests are being read; try again later.",
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
        return _saying({"type": "http.request", "body": body, "more_body": False}, receive)

    def _check_length(self, headers: Headers, most: int) -> None:
        length = _only(headers, b"content-length")
        if length is None:
            return
        if not length.isdigit() or len(length) > 15:
            raise Refused(400, "The Content-Length header is not a number of bytes.")
        if int(length) > most:
            raise _too_large(most)


class Upload:
    """An upload as it comes; its endpoint tells the client what is raised here. An answer may be there before all of it
    has come: the rest is thrown away, because most clients read only when they have sent everything."""

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
            raise Refusal("The upload came too slowly.", code="request_timeout", status=408) from None
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


class Refused(Exception):
    """Ends a request in this layer. `unread`: more of its body may come."""

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
    def told(cls, error: BankfullError) -> Refused:
        """What another layer would have said."""
        refused = cls(500, str(error), unread=False)
        refused.problem = problem_of(error)
        return refused


_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 503: "server_error"}


def _too_large(most: int, unread: bool = True) -> Refused:
    message = f"The request's body has more than {most} bytes; send a smaller one."
    return Refused(413, message, code="request_too_large", unread=unread)


def _too_slow(seconds: float) -> Refused:
    return Refused(408, f"The request's body did not arrive within {seconds:g} seconds.", code="request_timeout")


async def _refuse(refused: Refused, body: bytes, receive: Receive, send: Send) -> None:
    """Answers, and closes the connection. Many clients read an answer only when they have sent everything, and lose it
    when the connection is closed before: what they send is thrown away for a moment."""
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
        *refused.problem.headers,
    ]
    await send({"type": "http.response.start", "status": refused.problem.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while refused.unread:
                refused.unread = (await receive()).get("more_body", False)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _answer_preflight(scope: Scope, send: Send) -> None:
    wanted = _only(scope["headers"], b"access-control-request-headers") or b"authorization, content-type"
    headers = [
        (b"access-control-allow-methods", _CORS_METHODS),
        (b"access-control-allow-headers", wanted),
        (b"access-control-max-age", _CORS_SECONDS),
        (b"content-length", b"0"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def _telling(origin: bytes, send: Send) -> Send:
    """Lets the browser show the answer to the page that asked."""

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


def _saying(first: Message, then: Receive) -> Receive:
    said = False

    async def receive() -> Message:
        nonlocal said
        if said:
            return await then()
        said = True
        return first

    return receive


def _check_reserve(scope: Scope, *, admin: bool) -> None:
    if scope.get(ON_RESERVE) and not admin and scope["path"] not in PROBES:
        raise Refused(
            503,
            "The server, or your address, has as many connections as it may; try again later, or use one of them.",
            code="too_many_connections",
            retry_after=1.0,
        )


def _uploads(scope: Scope) -> bool:
    return scope["method"] == "POST" and scope["path"].rstrip("/") == UPLOAD_PATH


def _only(headers: Headers, name: bytes) -> bytes | None:
    """The header's value. One that comes twice is read differently by different programs, so it is refused."""
    values = [value for key, value in headers if key == name]
    if len(values) > 1:
        raise Refused(400, f"The header {name.decode()} is given {len(values)} times; send it once.")
    return values[0] if values else None


def _presented(headers: Headers) -> bytes | None:
    authorization, plain = _only(headers, b"authorization"), _only(headers, b"x-api-key")
    bearer = None
    if authorization is not None:
        scheme, _, value = authorization.partition(b" ")
        bearer = value.strip(b" ") if scheme.lower() == b"bearer" else None
    if bearer and plain and bearer != plain:
        raise Refused(401, "Two different API keys are given; send one.", code="invalid_api_key")
    return bearer or plain


def _without_port(host: str) -> str:
    """The end of an IPv6 address is marked by its bracket: what follows its colons is no port."""
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() and (not host.startswith("[") or name.endswith("]")) else host
