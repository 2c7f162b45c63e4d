"""The HTTP application: routes, calls and their answers, and error responses.

Authentication, limits and logs are middleware around it, which puts the caller into `scope["bankfull.caller"]`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bankfull import __version__
from bankfull.serve.answers.cache import ResponseCache
from bankfull.serve.api.anthropic.messages import CountTokens, Messages
from bankfull.serve.api.calls import CALLER, Api, Caller, spelled_at
from bankfull.serve.api.chat import Chat
from bankfull.serve.api.errors import Problem, Refusal, openai_error, problem_of
from bankfull.serve.api.openai.chat_completions import ChatCompletions
from bankfull.serve.api.openai.completions import Completions
from bankfull.serve.api.openai.embeddings import Embeddings
from bankfull.serve.api.openai.models import Models
from bankfull.serve.api.openai.responses import Responses
from bankfull.serve.api.openapi import document
from bankfull.serve.api.sse import SEND_BODY, EventStream, Message, Pulse, Receive, Send, send_events
from bankfull.serve.api.texts import Texts
from bankfull.serve.api.tokens import Detokenize, Tokenize
from bankfull.serve.engine.backend import Backend, Busy, EngineDied, Unavailable
from bankfull.serve.settings import Settings
from bankfull.serve.supervise import Supervisor

log = logging.getLogger("bankfull.serve")

Lifespan = Callable[[Starlette], AbstractAsyncContextManager[None]]

CLIENT_LEFT = 499
RETRIED = (Busy, Unavailable, EngineDied)
"""Errors worth a retry: they are about the service (no room, no engine), not about the call."""


def create_app(
    backend: Backend,
    texts: Texts,
    settings: Settings,
    *,
    lifespan: Lifespan | None = None,
    more_apis: Mapping[str, Api] | None = None,
    supervisor: Supervisor | None = None,
    response_cache: ResponseCache | None = None,
    unused_parts: Callable[[], Mapping[str, str]] = dict,
) -> Starlette:
    """`more_apis`: further endpoints by path, which take a JSON body by POST. `lifespan`: the context of the server.
    The server is not ready while a task of the `supervisor` fails. `response_cache`: answers deterministic calls.
    `unused_parts`: optional parts that cannot be used, and why."""
    apis = {**model_apis(backend, texts, settings), **(more_apis or {})}
    pulse, large = Pulse(settings.keep_alive_seconds), LargeBodies()
    models = Models(backend, texts, settings)
    public = Probes(backend, supervisor, unused_parts)
    described = b""

    async def version(request: Request) -> Response:
        return as_json({"version": __version__})

    async def openapi(request: Request) -> Response:
        nonlocal described
        if not described:  # other parts of the service add their routes after this function has returned
            paths = {route.path for route in request.app.routes if isinstance(route, Route)}
            described = msgspec.json.encode(document(paths))
        return as_json_bytes(described)

    async def reset(request: Request) -> Response:
        if caller_of(request.scope).key is None:
            raise Refusal("Resetting the prefix cache needs an API key.", code="invalid_api_key", status=401)
        return as_json({"pages": await backend.reset_cache()})

    app = Starlette(
        routes=[
            *(Route(path, Endpoint(api, pulse, large, response_cache), methods=["POST"]) for path, api in apis.items()),
            Route("/v1/models", models.all, methods=["GET"]),
            Route("/v1/models/{name:path}", models.one, methods=["GET"]),
            Route("/version", version, methods=["GET"]),
            Route("/live", public.live, methods=["GET"]),
            Route("/ready", public.ready, methods=["GET"]),
            Route("/health", public.health, methods=["GET"]),
            Route("/openapi.json", openapi, methods=["GET"]),
            Route("/reset_prefix_cache", reset, methods=["POST"]),
        ],
        exception_handlers={HTTPException: _http_problem, ValueError: _told, Exception: _told},
        lifespan=lifespan,
    )
    app.state.apis = apis
    return app


def model_apis(backend: Backend, texts: Texts, settings: Settings) -> dict[str, Api]:
    chat = Chat(backend, texts, settings.prices, settings.pin_minimum)
    return {
        "/v1/chat/completions": ChatCompletions(chat, settings),
        "/v1/responses": Responses(chat, settings),
        "/v1/messages": Messages(chat, settings),
        "/v1/messages/count_tokens": CountTokens(chat, settings),
        "/v1/completions": Completions(backend, texts, settings),
        "/v1/embeddings": Embeddings(backend, texts, settings),
        "/tokenize": Tokenize(chat, settings),
        "/detokenize": Detokenize(chat, settings),
    }


LARGE_BODY = 64 << 10
"""Bytes from which a body takes milliseconds to decode."""


class LargeBodies:
    """One large body per turn of the event loop: those of one client that arrive together must not delay the tokens of
    others by the sum of their decoding."""

    def __init__(self) -> None:
        self._one = asyncio.Lock()

    async def turn(self, size: int) -> None:
        if size >= LARGE_BODY:
            async with self._one:
                await asyncio.sleep(0)


class Endpoint:
    """One API over HTTP, as a raw ASGI application, so that no framework layer runs per token."""

    def __init__(self, api: Api, pulse: Pulse, large: LargeBodies, cache: ResponseCache | None = None) -> None:
        self._api, self._pulse, self._large, self._cache = api, pulse, large, cache

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        begun = False

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            body = await read_body(receive)
            async with Client(receive):
                await self._large.turn(len(body))
                answer, headers = await self._answer(scope, body)
                if isinstance(answer, bytes):
                    await send_json(noted, 200, answer, headers)
                else:
                    await send_events(answer, noted, self._pulse, scope.get(SEND_BODY), headers)
        except Exception as error:
            problem = problem_of(error)
            if begun:
                raise  # the server closes the connection: half an answer must not look like a whole one
            await send_json(send, problem.status, self._api.spell(problem), problem.headers)

    async def _answer(self, scope: Message, body: bytes) -> tuple[bytes | EventStream, list[tuple[bytes, bytes]]]:
        caller = caller_of(scope)
        if self._cache is None:
            return await self._api.answer(body, caller), []
        return await self._cache.answer(self._api, scope["path"], body, caller, scope["headers"])


class Client:
    """Context in which a disconnect of the client cancels the task that answers it, and so aborts its request. Errors
    that follow a disconnect are logged: there is no client left to answer."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._left = False

    async def __aenter__(self) -> Client:
        self._task = asyncio.current_task()
        self._watch = asyncio.ensure_future(self._until_gone())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: object) -> bool:
        self._watch.cancel()
        if not self._left or kind is None or not issubclass(kind, Exception | asyncio.CancelledError):
            return False
        if self._task is not None:
            self._task.uncancel()
        if issubclass(kind, Exception):
            log.info("error after the client disconnected: %s", error)
        return True

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._left = True
        if self._task is not None:
            self._task.cancel()


async def read_body(receive: Receive) -> bytes:
    """The whole body. `guard.checks` bounds its size and its time, and hands it on in one piece."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refusal("The client left before its call was complete.", status=CLIENT_LEFT)
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def call_api(
    apis: Mapping[str, Api], path: str, body: bytes | Mapping[str, Any], caller: Caller
) -> tuple[int, bytes]:
    """A call from within the service, for example a line of a batch: its status and its JSON document. Errors worth a
    retry (`RETRIED`) are raised."""
    api = apis.get(path)
    if api is None:
        problem = problem_of(Refusal(f"There is no API at {path[:100]}.", code="not_found", status=404))
        return problem.status, openai_error(problem)
    try:
        answer = await api.answer(body if isinstance(body, bytes) else msgspec.json.encode(body), caller)
        if isinstance(answer, bytes):
            return 200, answer
        await answer.aclose()
        raise Refusal("This call cannot be streamed: leave stream out.", param="stream")
    except RETRIED:
        raise
    except Exception as error:
        problem = problem_of(error)
        return problem.status, api.spell(problem)


class Probes:
    """Liveness and readiness probes."""

    def __init__(
        self,
        backend: Backend,
        supervisor: Supervisor | None = None,
        unused_parts: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._backend, self._supervisor, self._unused_parts = backend, supervisor, unused_parts

    async def live(self, request: Request) -> Response:
        return as_json({"status": "live"})

    async def ready(self, request: Request) -> Response:
        self._refuse_unready()
        return as_json({"status": "ready"})

    async def health(self, request: Request) -> Response:
        """Readiness, and the optional parts that the service does without."""
        self._refuse_unready()
        return as_json({"status": "ready", "without": self._unused_parts()})

    def _refuse_unready(self) -> None:
        if not self._backend.ready:
            raise Unavailable(self._backend.says)
        if self._supervisor is not None and (troubled := self._supervisor.troubled):
            raise Unavailable(f"A background task has failed and is being restarted: {', '.join(troubled)}.")


def caller_of(scope: Message) -> Caller:
    caller = scope.get(CALLER)
    return caller if isinstance(caller, Caller) else Caller()


def as_json(value: object) -> Response:
    return as_json_bytes(msgspec.json.encode(value))


def as_json_bytes(body: bytes) -> Response:
    return Response(body, media_type="application/json")


async def send_json(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    fixed = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": fixed + (headers or [])})
    await send({"type": "http.response.body", "body": body})


def _problem_response(request: Request, problem: Problem) -> Response:
    headers = {name.decode(): value.decode() for name, value in problem.headers}
    body = spelled_at(request.app.state.apis, request.url.path, problem)
    return Response(body, problem.status, headers, "application/json")


async def _told(request: Request, error: Exception) -> Response:
    return _problem_response(request, problem_of(error))


async def _http_problem(request: Request, error: Exception) -> Response:
    """Errors of routing itself: no such path, no such method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    path = request.url.path[:200]
    sentences = {
        404: f"There is nothing at {path}; /openapi.json lists what there is.",
        405: f"{path} does not take {request.method[:20]}.",
    }
    message = sentences.get(status, "The call cannot be served.")
    codes = {404: "not_found", 405: "method_not_allowed"}
    response = _problem_response(request, problem_of(Refusal(message, code=codes.get(status), status=status)))
    for name, value in (getattr(error, "headers", None) or {}).items():
        response.headers[name] = value
    return response
