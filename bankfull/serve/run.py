"""A server from beginning to end: the engine's process, the application, the socket, and what people are told."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import shlex
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

import msgspec
import uvicorn
from starlette.applications import Starlette

from bankfull.errors import BankfullError, ConfigError
from bankfull.serve.admission import QueueLimits
from bankfull.serve.app import create_app
from bankfull.serve.link import Link
from bankfull.serve.settings import Settings
from bankfull.serve.texts import Texts

BACKLOG = 2048
IDLE_CONNECTION_SECONDS = 60


def run_server(
    model: str, options: Mapping[str, str | int | float | bool | None], settings: Settings, *,
    queue_requests: int | None = None, grace: float = 30.0, open_to_all: bool = False,
) -> None:  # fmt: skip
    """Until it is stopped. A model that cannot be loaded ends it with a ModelError."""
    logging.basicConfig(format="bankfull: %(message)s", level=logging.INFO)
    if not open_to_all and not is_loopback(settings.host):
        raise ConfigError(
            f"{settings.host} can be reached from other machines: give --no-auth to let everybody in, or listen on "
            "127.0.0.1."
        )
    listening = listen(settings.host, settings.port)
    texts = Texts.open(model)
    link = Link(model, options, QueueLimits(requests=queue_requests))
    failure: list[BankfullError] = []

    async def announce(server: uvicorn.Server) -> None:
        try:
            await link.wait_ready()
        except BankfullError as error:
            failure.append(error)
            server.should_exit = True
            return
        print(greeting(link, settings, listening), flush=True)

    @asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        await link.start()
        announcing = asyncio.ensure_future(announce(server))
        try:
            yield
        finally:
            announcing.cancel()
            await link.drain(0.0)  # those who were given time have had it
            await link.close()
            texts.close()

    app = create_app(link, texts, settings, lifespan=life)
    config = uvicorn.Config(
        app, loop="uvloop", http="httptools", ws="none", lifespan="on", log_config=None, access_log=False,
        log_level="warning", server_header=False, proxy_headers=False, backlog=BACKLOG,
        timeout_keep_alive=IDLE_CONNECTION_SECONDS, timeout_graceful_shutdown=max(1, round(grace)),
    )  # fmt: skip
    server = uvicorn.Server(config)
    server.run([listening])
    if failure:
        raise failure[0]


def listen(host: str, port: int) -> socket.socket:
    """A socket at this address, or one clear sentence."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"{host!r} is no address of this machine: {error.strerror}.") from None
    listening = socket.socket(family, kind, protocol)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
    except OSError as error:
        listening.close()
        raise ConfigError(f"Cannot listen on {host}:{port} ({error.strerror}): choose another --port.") from None
    return listening


def is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def greeting(link: Link, settings: Settings, listening: socket.socket) -> str:
    """What a person needs to know when the model is ready."""
    host, port = settings.host, listening.getsockname()[1]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    name, facts = settings.names[0], link.facts
    size = "" if facts is None else f", context {facts.max_len} tokens, {facts.rows} at once, {facts.dtype}"
    body = msgspec.json.encode({"model": name, "messages": [{"role": "user", "content": "What is a river?"}]}).decode()
    call = f"curl {url}/v1/chat/completions -H 'content-type: application/json' -d {shlex.quote(body)}"
    return (
        f"bankfull serves {name}{size}\n"
        f"  OpenAI's clients   base_url {url}/v1\n"
        f"  this machine       {url}/ready, {url}/openapi.json\n"
        f"  to try it          {call}\n"
        "  to stop it         Ctrl-C"
    )
