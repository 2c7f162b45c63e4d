"""The layers of the service in their order: watch, guard, application."""

from __future__ import annotations

from dataclasses import dataclass, field

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from bankfull.serve.engine.backend import Backend
from bankfull.serve.guard.checks import AccessPolicy, App, Guard, GuardLimits
from bankfull.serve.guard.connections import ConnectionLimits
from bankfull.serve.guard.tls import Tls
from bankfull.serve.telemetry.exposition import CONTENT_TYPE
from bankfull.serve.telemetry.metrics import ServiceMetrics
from bankfull.serve.telemetry.trace import Running
from bankfull.serve.telemetry.watch import Watch


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """The operator's security options."""

    access: AccessPolicy
    tls: Tls = field(default_factory=Tls)
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    log_json: bool = False
    log_prompts: bool = False
    vllm_metrics: bool = False


def protect(
    app: Starlette,
    backend: Backend,
    access: AccessPolicy,
    metrics: ServiceMetrics,
    *,
    limits: GuardLimits | None = None,
    log_prompts: bool = False,
    running: Running | None = None,
) -> App:
    """`app` with key checks, limits and /metrics. Its endpoints must use a `WatchedBackend`."""

    async def show_metrics(request: Request) -> Response:
        return Response(metrics.write(backend), media_type=CONTENT_TYPE)

    app.add_route("/metrics", show_metrics, methods=["GET"])
    guard = Guard(app, access, limits, apis=app.state.apis, keep_bodies=log_prompts, running=running)
    return Watch(guard, metrics)
