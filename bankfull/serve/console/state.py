"""The state document that the console polls every second: the engine's counters and the time lines of requests, bounded
in size.

Every API key may read it. A key sees its own requests; a key with `admin` sees all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bankfull import __version__
from bankfull.serve.api.errors import Refusal
from bankfull.serve.console.pages import STATE_PATH, TABLES_PATH, page_routes
from bankfull.serve.console.timelines import TimeLine, TimeLines
from bankfull.serve.engine.backend import Backend
from bankfull.serve.engine.wire import Facts
from bankfull.serve.replicas.view import ReplicaView
from bankfull.serve.settings import Settings
from bankfull.serve.telemetry.metrics import ServiceMetrics
from bankfull.serve.telemetry.trace import current_trace

Views = Callable[[], Sequence[ReplicaView]]

SHOWN_RUNNING = 100
FRESH = {"cache-control": "no-store"}


class State(msgspec.Struct):
    version: str
    started: int
    """Start time of the server; data of an earlier server is stale."""
    clock: float
    """Monotonic seconds, for rates between two documents."""
    ready: bool
    model: str
    facts: dict[str, Any] | None
    load: dict[str, Any] | None
    """The engine's counters by name; None without an engine or before its first step."""
    prompt_tokens: float
    generation_tokens: float
    requests: list[TimeLine]
    """The first SHOWN_RUNNING running requests, and those that ended after the number in the query."""
    last: int
    """The number for the next query."""
    replicas: list[dict[str, Any]] = []
    """The engines behind the API; empty where there is only one, without a set of replicas."""


class ConsoleState:
    """The endpoint of the state document."""

    def __init__(
        self,
        backend: Backend,
        metrics: ServiceMetrics,
        lines: TimeLines,
        settings: Settings,
        replicas: Views | None = None,
    ) -> None:
        self._backend, self._metrics, self._lines, self._settings = backend, metrics, lines, settings
        self._replicas = replicas

    async def show(self, request: Request) -> Response:
        state = self.after(_number(request.query_params.get("after", "0")))
        return Response(msgspec.json.encode(state), headers=FRESH, media_type="application/json")

    async def show_tables(self, request: Request) -> Response:
        """A key sees the tables of its own sequences; a key with `admin` sees all."""
        trace = current_trace()
        key = None if trace is None else trace.key
        shown = {}
        for name, tables in (await self._backend.page_tables()).items():
            visible = [
                {**msgspec.structs.asdict(one), "key": one.tenant}
                for one in tables.sequences
                if key is None or key.admin or one.tenant == key.name
            ]
            seen = {page for one in visible for table in one["tables"] for page in table}
            held = {page: count for page, count in tables.references.items() if page in seen}
            shown[name] = {**msgspec.structs.asdict(tables), "sequences": visible, "references": held}
        return Response(msgspec.json.encode(shown), headers=FRESH, media_type="application/json")

    def after(self, number: int) -> State:
        backend, metrics = self._backend, self._metrics
        trace = current_trace()
        key = None if trace is None else trace.key
        all_keys = key is None or key.admin  # without keys, all requests belong to the same caller
        name = None if key is None else key.name
        running = [line for line in self._lines.running() if all_keys or line.key == name]
        shown = [line.show() for line in running[:SHOWN_RUNNING]]
        ended = list(self._lines.ended_after(number))
        last = max((line.number for line in ended), default=number)
        shown += [line for line in ended if all_keys or line.key == name]
        facts, load = backend.facts, backend.load
        return State(
            __version__,
            self._settings.created,
            time.monotonic(),
            backend.ready,
            self._settings.names[0],
            None if facts is None else _public(facts),
            None if load is None else msgspec.structs.asdict(load),
            sum(metrics.prompt_tokens.values.values()),
            sum(metrics.generation_tokens.values.values()),
            shown,
            last,
            [] if self._replicas is None else [_shown(view) for view in self._replicas()],
        )


def _public(facts: Facts) -> dict[str, Any]:
    """All facts except the model's name, which may be a path on this machine."""
    public = msgspec.structs.asdict(facts)
    del public["name"]
    return public


def _shown(view: ReplicaView) -> dict[str, Any]:
    """All of a replica except its problem, which may name a path on this machine; counters by name."""
    shown = msgspec.structs.asdict(view)
    del shown["problem"]
    if view.load is not None:
        shown["load"] = msgspec.structs.asdict(view.load)
    return shown


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise Refusal("after must be the `last` of an earlier response.", param="after")
    return int(text)


def console_routes(
    backend: Backend, metrics: ServiceMetrics, lines: TimeLines, settings: Settings, replicas: Views | None = None
) -> list[Route]:
    """All routes of the console."""
    state = ConsoleState(backend, metrics, lines, settings, replicas)
    return [
        *page_routes(),
        Route(STATE_PATH, state.show, methods=["GET"]),
        Route(TABLES_PATH, state.show_tables, methods=["GET"]),
    ]
