"""A server from start to shutdown: the engine process, the application, the socket, and the greeting."""

from __future__ import annotations

import asyncio
import gc
import logging
import shlex
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bankfull.errors import ConfigError
from bankfull.fleet.attainment import SloMeter
from bankfull.scratch import ScratchFolder
from bankfull.serve.answers.cache import ResponseCache, open_store
from bankfull.serve.answers.store import AnswerStore
from bankfull.serve.api.calls import Caller
from bankfull.serve.api.texts import Texts
from bankfull.serve.app import create_app
from bankfull.serve.batch.service import BatchService, handle_within
from bankfull.serve.console.state import console_routes
from bankfull.serve.engine.admission import QueueLimits
from bankfull.serve.engine.backend import STOPPED, Backend, Unavailable
from bankfull.serve.engine.keeper import STALL_SECONDS
from bankfull.serve.engine.link import Link
from bankfull.serve.guard.checks import GuardLimits, caller_named
from bankfull.serve.guard.connections import ConnectionTable
from bankfull.serve.guard.keys import Keyring
from bankfull.serve.guard.layers import Protection, protect
from bankfull.serve.guard.listen import raise_file_limit, uvicorn_config
from bankfull.serve.guard.reload import Reloader
from bankfull.serve.guard.tls import certificates_of
from bankfull.serve.handover import Predecessor, Successor
from bankfull.serve.replicas.local import SetFactory
from bankfull.serve.replicas.replica_set import ReplicaSet
from bankfull.serve.replicas.separate_set import SeparateSet
from bankfull.serve.settings import Settings
from bankfull.serve.supervise import Supervisor
from bankfull.serve.telemetry.log import Logs
from bankfull.serve.telemetry.metrics import ServiceMetrics
from bankfull.serve.telemetry.optional_parts import OptionalParts, Source
from bankfull.serve.telemetry.separation_metrics import separation_families
from bankfull.serve.telemetry.trace import Running
from bankfull.serve.telemetry.watch import WatchedBackend

log = logging.getLogger("bankfull.serve")

BATCH_PATHS = ("/v1/files", "/v1/batches")
LEAVING_SECONDS = 0.1
"""Time between two looks at the connections of a server that another one has replaced."""
MOVING_SECONDS = 10.0
"""Time that running calls of files and batches have before their data are handed over."""
FAREWELL_SECONDS = 5
"""Seconds that clients have to read the last event after the grace period."""
ACCEPTED_PER_TURN = 16
"""Connections that one turn of the event loop accepts at most."""
SWITCH_SECONDS = 0.0005
"""Seconds that the event loop waits at most for a thread that tokenizes to release the interpreter."""


def run_server(
    model: str,
    options: Mapping[str, str | int | float | bool | None],
    settings: Settings,
    *,
    protection: Protection,
    data: Path | None = None,
    queue_requests: int | None = None,
    grace: float = 30.0,
    stall_seconds: float = STALL_SECONDS,
    give_up_after: float = 0.0,
    replicas: SetFactory | None = None,
    slo: SloMeter | None = None,
    take_over: bool = False,
    response_cache: str | None = None,
) -> None:
    """Serve until stopped. A model that cannot be loaded at the start, or for `give_up_after` seconds later on (0: no
    limit), ends the server with a ModelError. `data`: the folder in which files and batches survive the server;
    without it they are temporary. `replicas` makes the engines behind the API from a function that makes a link to one
    (see `replicas.local`); without it there is one engine process, and no set of replicas on the path of a request.
    `slo` counts the requests that meet the latency objectives. `take_over`: load the model first, then get the
    listening socket of the server on this port, which ends (see `handover`). `response_cache`: SIZE[:PATH] of the
    cache for deterministic calls."""
    successor = Successor(settings.port, settings.host, data) if take_over else None
    logs = Logs(json=protection.log_json)
    answers: AnswerStore | None = None
    try:
        answers = None if response_cache is None else open_store(response_cache)
        with nullcontext(data) if data is not None else ScratchFolder("serve") as folder:
            place, times = folder, (grace, stall_seconds, give_up_after)
            kept = data is not None
            _run(
                model,
                options,
                settings,
                protection,
                place,
                kept,
                queue_requests,
                *times,
                replicas,
                slo,
                successor,
                answers,
            )
    finally:
        if answers is not None:
            answers.close()
        logs.close()
        if successor is not None:
            successor.close()


def _run(
    model: str,
    options: Mapping[str, str | int | float | bool | None],
    settings: Settings,
    protection: Protection,
    data: Path,
    kept: bool,
    queue_requests: int | None,
    grace: float,
    stall_seconds: float,
    give_up_after: float,
    replicas: SetFactory | None,
    slo: SloMeter | None,
    successor: Successor | None,
    answers: AnswerStore | None,
) -> None:
    sys.setswitchinterval(SWITCH_SECONDS)
    running = Running()
    keyring = protection.access.keyring
    certificates = certificates_of(protection.tls)
    reloader = Reloader(keyring, certificates, running, lambda owners: batches.cancel_all_of(owners))
    reloader.listen()
    possible = raise_file_limit(protection.connections.connections)
    connection_table = ConnectionTable(replace(protection.connections, connections=possible))
    listening = listen(settings.host, settings.port) if successor is None else None
    texts = Texts.open(model)
    queue = QueueLimits(requests=queue_requests)
    many = replicas is not None
    make_link = partial(
        Link,
        model=model,
        options=options,
        limits=queue,
        stall_seconds=stall_seconds,
        give_up_after=give_up_after,
        tells_prefixes=many,
        tells_weights=answers is not None,
    )
    link = make_link() if replicas is None else replicas(make_link)
    views = link.views if isinstance(link, ReplicaSet) else None
    if isinstance(link, ReplicaSet):
        link.check_model = texts.misfit
    predecessor: Predecessor | None = None
    failure: list[Exception] = []

    async def announce(server: uvicorn.Server) -> None:
        """Greet when the model is ready; end the server with the reason when the model is given up, however late."""
        try:
            await link.wait_ready()
            settle_heap()
            assert listening is not None
            with suppress(OSError):  # stdout is closed
                print(greeting(link, settings, listening, protection), flush=True)
            await link.wait_failed()
        except Exception as error:  # a failure of this task ends the server, too
            failure.append(error)
            server.should_exit = True

    @asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        if successor is None:
            await link.start()
        announcing = asyncio.ensure_future(announce(server))
        supervisor.keep("reloading of keys and certificates", reloader.run)
        try:
            async with batches:
                yield
        finally:
            if predecessor is not None:
                predecessor.close()
            announcing.cancel()
            await supervisor.close()
            await link.drain(0.0)  # the grace period is over
            await link.close()
            texts.close()

    supervisor = Supervisor()
    metrics = ServiceMetrics(
        settings.names[0], vllm_names=protection.vllm_metrics, supervisor=supervisor, replicas=views, slo=slo
    )
    backend = WatchedBackend(link, metrics, keyring)
    if isinstance(link, SeparateSet):
        counts = link.counts
        metrics.more.append(lambda: separation_families(counts))
    response_cache = None if answers is None else response_cache_of(answers, backend, texts, settings, options, keyring)
    if response_cache is not None:
        metrics.more.append(response_cache.families)
    sources: list[Source] = [lambda: backend.optional]
    if response_cache is not None:
        sources.append(lambda: {"response_cache": response_cache.problem})
    optional = OptionalParts(sources)
    metrics.more.append(optional.families)
    app = create_app(
        backend,
        texts,
        settings,
        lifespan=life,
        supervisor=supervisor,
        response_cache=response_cache,
        unused_parts=optional.unused,
    )

    def open_batches() -> BatchService:
        """Locks their folder: at a take-over this must wait until the old server has closed it."""
        made = BatchService(
            data,
            handle_within(app.state.apis, lambda key: caller_named(protection.access, key), keyring),
            rows=lambda: link.facts.rows if link.facts is not None else 1,
            count=lambda outcome: metrics.batch_requests.add(1, outcome),
            wait=keyring.batch_wait,
            most_body_bytes=settings.max_body_bytes,
            supervisor=supervisor,
        )
        app.router.routes.extend(made.routes)
        return made

    if successor is None:
        batches = open_batches()
    app.router.routes.extend(console_routes(backend, metrics, backend.lines, settings, views))
    limits = GuardLimits(body_bytes=settings.max_body_bytes)
    layers = protect(
        app, backend, protection.access, metrics, limits=limits, log_prompts=protection.log_prompts, running=running
    )
    config = uvicorn_config(
        layers,
        settings.host,
        settings.port,
        connection_table=connection_table,
        certificates=certificates,
        log_level="warning",
        timeout_graceful_shutdown=round(grace) + FAREWELL_SECONDS,
    )

    async def prepare() -> list[socket.socket]:
        nonlocal listening, batches
        if successor is not None:
            try:
                await link.start()
                await link.wait_all_ready()
                listening = await successor.listener()
                await successor.release()
                batches = open_batches()
            except BaseException:
                await link.close()
                raise
        assert listening is not None
        # The event loop accepts one connection per turn and socket. A client that connects and leaves again and again
        # would keep the connections of others waiting in the kernel.
        return [listening, *(listening.dup() for _ in range(ACCEPTED_PER_TURN - 1))]

    async def release() -> None:
        """Close files and batches for the server that takes over."""
        routes = app.router.routes
        routes[:] = [route for route in routes if route not in batches.routes] + list(map(moved, batches.routes))
        await running.until_ended(lambda trace: trace.path.startswith(BATCH_PATHS), MOVING_SECONDS)
        await batches.close()

    def leave() -> None:
        log.info("Another server has taken over; this one ends when its connections have ended.")
        connection_table.leaving = True
        server.leave()
        if isinstance(link, ReplicaSet):
            link.shrink()

    async def accepting() -> None:
        nonlocal predecessor
        assert listening is not None
        if successor is not None:
            await successor.leave()
            log.info("The server %d has handed over its connections to come.", successor.pid)
        try:
            kept_data = data if kept else None
            predecessor = Predecessor(listening, settings.host, kept_data, release=release, leave=leave)
            predecessor.announce()
            supervisor.keep("hand-over to another server", predecessor.run)
        except OSError as error:
            log.error("--take-over will not find this server: %s.", error)

    server = Server(config, running, grace, prepare, accepting)
    server.run()
    if failure:
        raise failure[0]


class Server(uvicorn.Server):
    """uvicorn's server, which sends an error to the calls that still run at the end of the grace period, and which may
    leave its listening sockets to another server."""

    def __init__(
        self,
        config: uvicorn.Config,
        running: Running,
        grace: float,
        prepare: Callable[[], Awaitable[list[socket.socket]]],
        accepting: Callable[[], Awaitable[None]],
    ) -> None:
        """`prepare` returns the sockets to listen on; `accepting` is called when connections are accepted."""
        super().__init__(config)
        self._running, self._grace = running, grace
        self._prepare, self._accepting = prepare, accepting
        self._sockets: list[socket.socket] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._sockets = await self._prepare()
        await super().startup(self._sockets)
        if self.started:
            await self._accepting()

    def leave(self) -> None:
        """Accept no more connections, and end when those that there are have ended."""
        for server in self.servers:
            server.close()
        for listening in self._sockets:
            listening.close()
        self._end_when_idle()

    def _end_when_idle(self) -> None:
        if self.server_state.connections:
            asyncio.get_running_loop().call_later(LEAVING_SECONDS, self._end_when_idle)
        else:
            self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.get_running_loop().call_later(self._grace, self._running.end, Unavailable(STOPPED))
        try:
            await super().shutdown(self._sockets)
        finally:
            ending.cancel()


def settle_heap() -> None:
    """Exclude objects that live as long as the process from garbage collection, which blocks the event loop. Nearly all
    others are freed by their last reference, so that collections can be rare."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def moved(route: Route) -> Route:
    """The same path after its data were handed over to another server."""

    async def refuse(request: Request) -> Response:
        raise Unavailable("Files and batches are moving to another server on this port; ask again in a moment.")

    return Route(route.path, refuse, methods=list(route.methods or ["GET"]))


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


def response_cache_of(
    answers: AnswerStore,
    backend: Backend,
    texts: Texts,
    settings: Settings,
    options: Mapping[str, str | int | float | bool | None],
    keyring: Keyring,
) -> ResponseCache:
    """Bound to all that an answer depends on; an owner is the hash of a key, so that a new key of an old name finds
    nothing."""
    defaults = texts.defaults if settings.use_generation_config else None
    prices = None if settings.prices is None else asdict(settings.prices)
    about = {"options": dict(options), "defaults": defaults, "names": settings.names, "prices": prices}

    def owner(caller: Caller) -> str:
        key = None if caller.key is None else keyring.named(caller.key)
        return "" if key is None else key.digest

    return ResponseCache(answers, lambda: backend.facts, about, owner)


def greeting(link: Link | ReplicaSet, settings: Settings, listening: socket.socket, protection: Protection) -> str:
    """The text for the terminal when the model is ready."""
    host, port = settings.host, listening.getsockname()[1]
    scheme = "http" if protection.tls.certificate is None else "https"
    url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
    key = " -H 'authorization: Bearer KEY'" if protection.access.keyring.required else ""
    name, facts = settings.names[0], link.facts
    size = "" if facts is None else f", context {facts.max_len} tokens, {facts.rows} at once, {facts.dtype}"
    body = msgspec.json.encode({"model": name, "messages": [{"role": "user", "content": "What is a river?"}]}).decode()
    call = f"curl {url}/v1/chat/completions -H 'content-type: application/json'{key} -d {shlex.quote(body)}"
    return (
        f"bankfull serves {name}{size}\n"
        f"  in a browser       {url}/\n"
        f"  OpenAI's clients   base_url {url}/v1\n"
        f"  this machine       {url}/ready, {url}/openapi.json\n"
        f"  to try it          {call}\n"
        "  to stop it         Ctrl-C"
    )
