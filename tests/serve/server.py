"""The application on a real socket, in a thread of the test's own process."""

from __future__ import annotations

import asyncio
import atexit
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import uvicorn


@contextmanager
def served(app: Any) -> Iterator[str]:
    """The base URL, as long as it is entered."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="error", loop="uvloop", http="httptools", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])), daemon=True)
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise RuntimeError("the server did not start")
            threading.Event().wait(0.01)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        listening.close()


class Stage:
    """A backend whose part another one plays: a server that is started once serves many tests."""

    def __init__(self) -> None:
        self.current: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.current, name)


@lru_cache
def _shared() -> tuple[Stage, str]:
    from bankfull.serve.app import create_app
    from tests.serve.scripted import scripted_texts, settings

    stage = Stage()
    running = served(create_app(stage, scripted_texts(), settings()))  # type: ignore[arg-type]
    atexit.register(running.__exit__, None, None, None)
    return stage, running.__enter__()


def shared(backend: Any) -> str:
    """The base URL of a server with the default settings, on which `backend` plays from now on."""
    stage, url = _shared()
    stage.current = backend
    return url
