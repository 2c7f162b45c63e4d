"""An ASGI application on a real socket, in a thread."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn

from bankfull.serve.guard.listen import uvicorn_config


@dataclass
class Listening:
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def send(self, request: bytes, *, pause: float = 0.0, timeout: float = 60.0) -> bytes:
        """Send raw bytes, in two halves if there is a pause; return everything received until the server closes the
        connection."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=timeout) as connection:
            if pause:
                connection.sendall(request[: len(request) // 2])
                time.sleep(pause)
                request = request[len(request) // 2 :]
            try:
                connection.sendall(request)
                return b"".join(iter(lambda: connection.recv(65536), b""))
            except (BrokenPipeError, ConnectionResetError):
                return b""


@contextmanager
def listening(app: Any, **options: Any) -> Iterator[Listening]:
    """Serve on a free port until the end of the block."""
    server_socket = socket.socket()
    server_socket.bind(("127.0.0.1", 0))
    served = Listening(server_socket.getsockname()[1])
    server = uvicorn.Server(uvicorn_config(app, "127.0.0.1", served.port, **({"lifespan": "auto"} | options)))
    thread = threading.Thread(target=server.run, args=([server_socket],), daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started:
        assert thread.is_alive() and time.monotonic() < deadline, "the server did not start"
        time.sleep(0.01)
    try:
        yield served
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)
