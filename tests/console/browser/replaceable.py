"""A console without an engine at a fixed address, whose server can be replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from bankfull.serve.app import create_app
from bankfull.serve.console.state import console_routes
from bankfull.serve.guard.checks import App, Receive, Scope, Send, access_policy
from bankfull.serve.guard.keys import Keyring
from bankfull.serve.guard.layers import protect
from bankfull.serve.telemetry.metrics import ServiceMetrics
from bankfull.serve.telemetry.watch import WatchedBackend
from tests.serve.scripted import Scripted, scripted_texts, settings
from tests.serve.server import served


@contextmanager
def replaceable_server() -> Iterator[tuple[str, Callable[[str], None]]]:
    """The URL, and a function that replaces the server with one that serves the given model name."""
    starts = count(1)
    current: App

    def replace(model: str) -> None:
        nonlocal current
        keyring, metrics, chosen = Keyring(), ServiceMetrics(), settings(names=(model,), created=next(starts))
        backend = WatchedBackend(Scripted(), metrics, keyring)
        app = create_app(backend, scripted_texts(), chosen)
        app.router.routes.extend(console_routes(backend, metrics, backend.lines, chosen))
        current = protect(app, backend, access_policy(keyring, host="127.0.0.1"), metrics)

    async def stage(scope: Scope, receive: Receive, send: Send) -> None:
        await current(scope, receive, send)

    replace("one")
    with served(stage) as url:
        yield url, replace
