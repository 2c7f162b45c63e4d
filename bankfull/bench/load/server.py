"""A server under test: its address, its model, and what it reports about itself."""

from __future__ import annotations

import http.client
import ipaddress
import json
import socket
import ssl
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

from bankfull.errors import ConfigError

TIMEOUT = 60.0
OWNER = "bankfull"


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Address of a server, resolved once, so that DNS does not count as latency."""

    url: str
    secure: bool
    host: str
    port: int
    prefix: str
    """Prefix of every path, without /v1."""
    ip: str

    @property
    def local(self) -> bool:
        """Whether the server is on this machine, so that its energy and ceilings apply."""
        return ipaddress.ip_address(self.ip.partition("%")[0]).is_loopback

    @property
    def context(self) -> ssl.SSLContext | None:
        return ssl.create_default_context() if self.secure else None


def parse_address(url: str) -> ServerAddress:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url!r} is not the address of a server; give one like http://127.0.0.1:8000.")
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        raise ConfigError(f"{url!r} has no valid port; give one like http://127.0.0.1:8000.") from None
    try:
        ip = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)[0][4][0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"The server name {parts.hostname!r} cannot be resolved: {error}.") from None
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return ServerAddress(url, parts.scheme == "https", parts.hostname, port, prefix, str(ip))


@dataclass(slots=True, weakref_slot=True)
class Response:
    """Status and body of a response."""

    status: int
    body: bytes

    @property
    def json(self) -> Any:
        try:
            return json.loads(self.body)
        except ValueError:
            return None


@dataclass
class ServerUnderTest:
    """Sends one request at a time before and after a run, never during a measurement."""

    address: ServerAddress
    key: str | None = None
    name: str | None = None
    """Model name; None: the first model that the server lists."""
    headers: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def model(self) -> str:
        if self.name is not None:
            return self.name
        models = self._models
        if not models or not isinstance(models[0].get("id"), str):
            raise ConfigError(f"{self.address.url} lists no model at /v1/models; give its name with --model.")
        return str(models[0]["id"])

    @cached_property
    def _models(self) -> list[dict[str, Any]]:
        response = self.ask("GET", "/v1/models")
        if response.status == 401:
            raise ConfigError(f"{self.address.url} requires an API key: put it into BANKFULL_API_KEY.")
        document = response.json
        data = document.get("data") if isinstance(document, dict) else None
        return [entry for entry in data if isinstance(entry, dict)] if isinstance(data, list) else []

    @cached_property
    def entry(self) -> dict[str, Any]:
        """The server's entry for its model; empty if there is none."""
        return next((entry for entry in self._models if entry.get("id") == self.model), {})

    @property
    def ours(self) -> bool:
        return self.entry.get("owned_by") == OWNER

    @property
    def static_batch(self) -> int:
        """Requests that the server starts together, each of which waits for the last one; 1 if none waits."""
        size = self.entry.get("static_batch") if self.ours else None
        return size if isinstance(size, int) and size > 0 else 1

    def tokenize(self, text: str) -> list[int] | None:
        """None if the server does not offer it."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        response = self.ask("POST", "/tokenize", body)
        if response.status != 200:  # llama.cpp calls the field `content`
            response = self.ask("POST", "/tokenize", {"content": text})
        document = response.json if response.status == 200 else None
        tokens = document.get("tokens") if isinstance(document, dict) else None
        usable = isinstance(tokens, list) and bool(tokens) and all(type(token) is int for token in tokens)
        return tokens if usable else None

    def metrics(self) -> str | None:
        """Prometheus metrics, if the server has them."""
        response = self.ask("GET", "/metrics")
        return response.body.decode(errors="replace") if response.status == 200 else None

    def wait_ready(self, seconds: float) -> None:
        """Wait until /v1/models and /health respond."""
        last = time.monotonic() + seconds
        while True:
            with suppress(ConfigError):
                if self.ask("GET", "/v1/models").status == 200:
                    ready = self.ask("GET", "/health").status  # a server may list its model before it is loaded
                    if ready in (200, 404, 405):
                        return
            if time.monotonic() > last:
                raise ConfigError(f"{self.address.url} was not ready after {seconds:g} s; check the server's log.")
            time.sleep(0.2)

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Response:
        place = self.address
        connection: http.client.HTTPConnection = (
            http.client.HTTPSConnection(place.host, place.port, timeout=TIMEOUT, context=place.context)
            if place.secure
            else http.client.HTTPConnection(place.host, place.port, timeout=TIMEOUT)
        )
        data = None if body is None else json.dumps(body).encode()
        try:
            connection.request(method, place.prefix + path, data, self.all_headers())
            answer = connection.getresponse()
            return Response(answer.status, answer.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = " ".join(str(getattr(error, "strerror", None) or error or type(error).__name__).split())
            raise ConfigError(f"The server at {place.url} cannot be reached ({reason}).") from None
        finally:
            connection.close()

    def all_headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json", **self.headers}
        if self.key:
            headers["authorization"] = f"Bearer {self.key}"
        return headers
