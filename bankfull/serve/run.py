"""A server from start to shutdown: the engine process, the application, the socket, and the greeting."""

from __future__ import annotations

import asyncio
import gc
import logging
import shlex
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from dataclasses import asdict, dataclass, replace
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
from bankfull.serve.engine.backend import STOPPED, Unavailable
from bankfull.serve.engine.keeper import STALL_SECONDS
from bankfull.serve.engine.link import Link
from bankfull.serve.guard.checks import GuardLimits, caller_named
from bankfull.serve.guard.connections import ConnectionTable
from bankfull.serve.guard.layers import Protection, protect
from bankfull.serve.guard.listen import raise_file_limit, uvicorn_config
from bankfull.serve.guard.reload import Reloader
from bankfull.serve.guard.tls import certificates_of
from bankfull.serve.handover import Predecessor, Successor
from bankfull.serve.replicas.local import SetFactory
from bankfull.serve.replicas.replica_set import ReplicaSet
from bankfull.serve.replicas.separate_set import SeparateSet
from bankfull.serve.replicas.view import ReplicaView
from bankfull.serve.settings import Settings
from bankfull.serve.supervise import Supervisor
from bankfull.serve.telemetry.families import separation_families
from bankfull.serve.telemetry.log import Logs
from bankfull.serve.telemetry.metrics import ServiceMetrics
from bankfull.serve.telemetry.optional_parts import OptionalParts
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What a server serves, and how."""

    model: str
    options: Mapping[str, str | int | float | bool | None]
    """The options of `LLM`."""
    settings: Settings
    protection: Protection
    data: Path | None = None
    """The folder in which files and batches survive the server; without it they are temporary."""
    queue_requests: int | None = None
    grace: float = 30.0
    """Seconds that running requests may take after the server was told to end."""
    stall_seconds: float = STALL_SECONDS
    give_up_after: float = 0.0
    """Seconds without an engine after which a model that was loaded before ends the server; 0: no limit."""
    replicas: SetFactory | None = None
    """Makes the engines behind the API from a function that makes a link to one (see `replicas.local`); None: one
    engine process, and no set of replicas on the path of a request."""
    slo: SloMeter | None = None
    """Counts the requests that meet the latency objectives."""
    take_over: bool = False
    """Load the model first, then get the listening socket of the server on this port, which ends (see `handover`)."""
    response_cache: str | None = None
    """SIZE[:PATH] of the cache for deterministic calls."""


def run_server(deployment: Deployment) -> None:
    """Serve until stopped. A model that cannot be loaded at the start, or for `give_up_after` seconds later on, ends
    the server with a ModelError."""
    settings, data = deployment.settings, deployment.data
    sys.setswitchinterval(SWITCH_SECONDS)
    with ExitStack() as opened:
        successor = None
        if deployment.take_over:
            successor = opened.enter_context(closing(Successor(settings.port, settings.host, data)))
        opened.enter_context(closing(Logs(json=deployment.protection.log_json)))
        answers = None
        if deployment.response_cache is not None:
            answers = opened.enter_context(closing(open_store(deployment.response_cache)))
        folder = data if data is not None else opened.enter_context(ScratchFolder("serve"))
        ServerParts(deployment, folder, successor, answers).run()


class ServerParts:
    """The parts of a server, in the order in which they are opened."""

    def __init__(
        self, deployment: Deployment, data: Path, successor: Successor | None, answers: AnswerStore | None
    ) -> None:
        settings, protection = deployment.settings, deployment.protection
        self._deployment, self._data, self._successor, self._answers = deployment, data, successor, answers
        self._settings, self._protection = settings, protection
        self._running, self._supervisor = Running(), Supervisor()
        self._keyring, self._certificates = protection.access.keyring, certificates_of(protection.tls)
        self._reloader = Reloader(
            self._keyring, self._certificates, self._running, lambda owners: self._batches.cancel_all_of(owners)
        )
        self._reloader.listen()
        possible = raise_file_limit(protection.connections.connections)
        self._connections = ConnectionTable(replace(protection.connections, connections=possible))
        self._listening = listen(settings.host, settings.port) if successor is None else None
        self._texts = Texts.open(deployment.model)
        self._link = self._linked()
        self._metrics = ServiceMetrics(
            settings.names[0],
            vllm_names=protection.vllm_metrics,
            supervisor=self._supervisor,
            replicas=self._views,
            slo=deployment.slo,
        )
        self._backend = WatchedBackend(self._link, self._metrics, self._keyring)
        self._app = self._application()
        if successor is None:
            self._batches = self._opened_batches()
        self._app.router.routes.extend(
            console_routes(self._backend, self._metrics, self._backend.lines, settings, self._views)
        )
        self._server = self._listener()
        self._predecessor: Predecessor | None = None
        self._failure: Exception | None = None

    def run(self) -> None:
        self._server.run()
        if self._failure is not None:
            raise self._failure

    # -- parts

    def _linked(self) -> Link | ReplicaSet:
        """The engines."""
        deployment = self._deployment
        make_link = partial(
            Link,
            model=deployment.model,
            options=deployment.options,
            limits=QueueLimits(requests=deployment.queue_requests),
            stall_seconds=deployment.stall_seconds,
            give_up_after=deployment.give_up_after,
            tells_prefixes=deployment.replicas is not None,
            tells_weights=self._answers is not None,
        )
        if deployment.replicas is None:
            return make_link()
        replicas = deployment.replicas(make_link)
        replicas.check_model = self._texts.misfit
        return replicas

    @property
    def _views(self) -> Callable[[], list[ReplicaView]] | None:
        """A view of each replica; None with one engine."""
        return self._link.views if isinstance(self._link, ReplicaSet) else None

    def _application(self) -> Starlette:
        """The API, and the metrics of its optional parts."""
        families, unused = self._metrics.more, [lambda: self._backend.optional]
        if isinstance(self._link, SeparateSet):
            counts = self._link.counts
            families.append(lambda: separation_families(counts))
        cache = None if self._answers is None else self._response_cache(self._answers)
        if cache is not None:
            families.append(cache.families)
            unused.append(lambda: {"response_cache": cache.problem})
        optional = OptionalParts(unused)
        families.append(optional.families)
        return create_app(
            self._backend,
            self._texts,
            self._settings,
            lifespan=self._life,
            supervisor=self._supervisor,
            response_cache=cache,
            unused_parts=optional.unused,
        )

    def _response_cache(self, answers: AnswerStore) -> ResponseCache:
        """Bound to all that an answer depends on; an owner is the hash of a key, so that a new key of an old name finds
        nothing."""
        settings, keyring = self._settings, self._keyring
        about = {
            "options": dict(self._deployment.options),
            "defaults": self._texts.defaults if settings.use_generation_config else None,
            "names": settings.names,
            "prices": None if settings.prices is None else asdict(settings.prices),
        }

        def owner(caller: Caller) -> str:
            key = None if caller.key is None else keyring.named(caller.key)
            return "" if key is None else key.digest

        return ResponseCache(answers, lambda: self._backend.facts, about, owner)

    def _opened_batches(self) -> BatchService:
        """Locks their folder: at a take-over this must wait until the old server has closed it."""
        access, link = self._protection.access, self._link
        service = BatchService(
            self._data,
            handle_within(self._app.state.apis, lambda key: caller_named(access, key), self._keyring),
            rows=lambda: link.facts.rows if link.facts is not None else 1,
            count=lambda outcome: self._metrics.batch_requests.add(1, outcome),
            wait=self._keyring.batch_wait,
            most_body_bytes=self._settings.max_body_bytes,
            supervisor=self._supervisor,
        )
        self._app.router.routes.extend(service.routes)
        return service

    def _listener(self) -> Server:
        """The application behind its guards, and the connections in front of it."""
        settings, protection, grace = self._settings, self._protection, self._deployment.grace
        layers = protect(
            self._app,
            self._backend,
            protection.access,
            self._metrics,
            limits=GuardLimits(body_bytes=settings.max_body_bytes),
            log_prompts=protection.log_prompts,
            running=self._running,
        )
        config = uvicorn_config(
            layers,
            settings.host,
            settings.port,
            connection_table=self._connections,
            certificates=self._certificates,
            log_level="warning",
            timeout_graceful_shutdown=round(grace) + FAREWELL_SECONDS,
        )
        return Server(config, self._running, grace, self._prepare, self._accepting)

    # -- life

    @asynccontextmanager
    async def _life(self, app: Starlette) -> AsyncIterator[None]:
        link = self._link
        if self._successor is None:
            await link.start()
        announcing = asyncio.ensure_future(self._announce())
        self._supervisor.keep("reloading of keys and certificates", self._reloader.run)
        try:
            async with self._batches:
                yield
        finally:
            if self._predecessor is not None:
                self._predecessor.close()
            announcing.cancel()
            await self._supervisor.close()
            await link.drain(0.0)  # the grace period is over
            await link.close()
            self._texts.close()

    async def _announce(self) -> None:
        """Greet when the model is ready; end the server with the reason when the model is given up, however late."""
        try:
            await self._link.wait_ready()
            settle_heap()
            assert self._listening is not None
            with suppress(OSError):  # stdout is closed
                print(greeting(self._link, self._settings, self._listening, self._protection), flush=True)
            await self._link.wait_failed()
        except Exception as error:  # a failure of this task ends the server, too
            self._failure = error
            self._server.should_exit = True

    async def _prepare(self) -> list[socket.socket]:
        """The sockets to listen on; at a take-over, those of the old server, when the model is loaded."""
        if (successor := self._successor) is not None:
            try:
                await self._link.start()
                await self._link.wait_all_ready()
                self._listening = await successor.listener()
                await successor.release()
                self._batches = self._opened_batches()
            except BaseException:
                await self._link.close()
                raise
        assert self._listening is not None
        # The event loop accepts one connection per turn and socket. A client that connects and leaves again and again
        # would keep the connections of others waiting in the kernel.
        return [self._listening, *(self._listening.dup() for _ in range(ACCEPTED_PER_TURN - 1))]

    async def _accepting(self) -> None:
        """Connections are accepted: a take-over may begin."""
        assert self._listening is not None
        if (successor := self._successor) is not None:
            await successor.leave()
            log.info("The server %d has handed over its connections to come.", successor.pid)
        try:
            self._predecessor = Predecessor(
                self._listening, self._settings.host, self._deployment.data, release=self._release, leave=self._leave
            )
            self._predecessor.announce()
            self._supervisor.keep("hand-over to another server", self._predecessor.run)
        except OSError as error:
            log.error("--take-over will not find this server: %s.", error)

    # -- another server takes over

    async def _release(self) -> None:
        """Close files and batches for the server that takes over."""
        routes, batches = self._app.router.routes, self._batches
        routes[:] = [route for route in routes if route not in batches.routes] + list(map(moved, batches.routes))
        await self._running.until_ended(lambda trace: trace.path.startswith(BATCH_PATHS), MOVING_SECONDS)
        await batches.close()

    def _leave(self) -> None:
        log.info("Another server has taken over; this one ends when its connections have ended.")
        self._connections.leaving = True
        self._server.leave()
        if isinstance(self._link, ReplicaSet):
            self._link.shrink()


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
