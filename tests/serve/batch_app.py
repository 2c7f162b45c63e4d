"""Files and batches with a handler that responds at random: as an application, and as a process to kill.

python -m tests.serve.batch_app FOLDER SECONDS serves, and prints its URL
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from bankfull.serve.api.errors import Refusal, openai_error, problem_of
from bankfull.serve.batch.runner import Handle
from bankfull.serve.batch.service import BatchService
from bankfull.serve.engine.backend import Busy, EngineDied, Unavailable


async def error_response(request: Request, error: Exception) -> Response:
    problem = problem_of(error)
    headers = {name.decode(): value.decode() for name, value in problem.headers}
    return Response(openai_error(problem), problem.status, headers, "application/json")


def owner_of(request: Request) -> str:
    return request.headers.get("authorization", "")


def batch_app(folder: Path, handle: Handle, **options: Any) -> Starlette:
    service = BatchService(folder, handle, rows=lambda: 4, owner_of=owner_of, **options)

    @asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        async with service:
            yield

    app = Starlette(
        routes=list(service.routes),
        exception_handlers={ValueError: error_response, Exception: error_response},
        lifespan=life,
    )
    app.state.service = service
    return app


class RandomHandler:
    """Echoes the question after a random delay; sometimes raises Busy or Unavailable; refuses the question 'bad'."""

    def __init__(self, seed: int, seconds: float = 0.004, trouble: float = 0.1) -> None:
        self._random, self._seconds, self._trouble = random.Random(seed), seconds, trouble
        self.calls: list[tuple[str, str]] = []
        self.most = self._running = 0

    async def __call__(self, url: str, body: bytes, *, priority: int, key: str) -> tuple[int, bytes]:
        question = msgspec.json.decode(body)["question"]
        self.calls.append((key, question))
        self._running += 1
        self.most = max(self.most, self._running)
        try:
            await asyncio.sleep(self._random.random() * self._seconds)
            if self._random.random() < self._trouble:
                raise self._random.choice([Busy("full", 0.001), Unavailable("no engine")])
            if question == "deadly":
                raise EngineDied("killed by a question")
            if question == "bad":
                raise Refusal("This question is refused.", param="question")
            return 200, msgspec.json.encode({"answer": question, "priority": priority})
        finally:
            self._running -= 1


def main(folder: str, seconds: str) -> None:
    import socket

    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()  # connections made before the server runs are queued
    app = batch_app(Path(folder), RandomHandler(random.randrange(1 << 30), float(seconds), trouble=0.0))
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run([listening])


if __name__ == "__main__":
    main(*sys.argv[1:])
