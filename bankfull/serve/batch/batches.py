"""The endpoints of /v1/batches: create, retrieve, list and cancel, compatible with OpenAI's clients."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bankfull.serve.api.errors import Refusal
from bankfull.serve.batch.files import ExpiresAfter, OwnerOf, as_json, list_parameters, page_of
from bankfull.serve.batch.input import ENDPOINTS
from bankfull.serve.batch.runner import BatchRunner
from bankfull.serve.data.batch_store import BatchRecord, BatchStore

LARGEST_BODY = 64 << 10
SECONDS = {"m": 60, "h": 3600, "d": 86400}
LONGEST_WINDOW = 7 * 86400

_Key = Annotated[str, msgspec.Meta(max_length=64)]
_Value = Annotated[str, msgspec.Meta(max_length=512)]


class CreateBatch(msgspec.Struct, forbid_unknown_fields=True):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Annotated[dict[_Key, _Value], msgspec.Meta(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None


class Counts(msgspec.Struct):
    total: int
    completed: int
    failed: int


class BatchErrors(msgspec.Struct):
    data: msgspec.Raw
    object: Literal["list"] = "list"


class BatchInputDetails(msgspec.Struct):
    cached_tokens: int


class BatchOutputDetails(msgspec.Struct):
    reasoning_tokens: int


class BatchUsage(msgspec.Struct):
    """Token usage of all lines that have a result."""

    input_tokens: int
    input_tokens_details: BatchInputDetails
    output_tokens: int
    output_tokens_details: BatchOutputDetails
    total_tokens: int


class BatchReply(msgspec.Struct):
    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: str
    created_at: int
    expires_at: int
    request_counts: Counts
    metadata: msgspec.Raw | None
    errors: BatchErrors | None
    output_file_id: str | None
    error_file_id: str | None
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    usage: BatchUsage
    object: Literal["batch"] = "batch"


def batch_routes(batch_store: BatchStore, runner: BatchRunner, owner_of: OwnerOf) -> list[Route]:
    endpoints = BatchEndpoints(batch_store, runner, owner_of)
    return [
        Route("/v1/batches", endpoints.create, methods=["POST"]),
        Route("/v1/batches", endpoints.list, methods=["GET"]),
        Route("/v1/batches/{id}", endpoints.retrieve, methods=["GET"]),
        Route("/v1/batches/{id}/cancel", endpoints.cancel, methods=["POST"]),
    ]


class BatchEndpoints:
    def __init__(self, batch_store: BatchStore, runner: BatchRunner, owner_of: OwnerOf) -> None:
        self._batch_store, self._runner, self._owner_of = batch_store, runner, owner_of

    async def create(self, request: Request) -> Response:
        call = await _body(request)
        if call.endpoint not in ENDPOINTS:
            raise Refusal(f"endpoint must be one of {', '.join(ENDPOINTS)}.", param="endpoint")
        batch = await self._run(
            self._batch_store.create,
            self._owner_of(request),
            call.input_file_id,
            call.endpoint,
            call.completion_window,
            window_seconds(call.completion_window),
            call.metadata,
            call.output_expires_after.seconds if call.output_expires_after else None,
        )
        self._runner.wake()
        return as_json(_reply(batch))

    async def list(self, request: Request) -> Response:
        given = list_parameters(request, {"after", "limit"}, most=100, usual=20)
        batches, more = await self._run(
            lambda: self._batch_store.batches(self._owner_of(request), after=given.after, limit=given.limit)
        )
        return as_json(page_of([_reply(batch) for batch in batches], more))

    async def retrieve(self, request: Request) -> Response:
        return as_json(
            _reply(await self._run(self._batch_store.batch, self._owner_of(request), request.path_params["id"]))
        )

    async def cancel(self, request: Request) -> Response:
        id = request.path_params["id"]
        batch = await self._run(self._batch_store.cancel, self._owner_of(request), id)
        self._runner.wake(id)
        return as_json(_reply(batch))

    async def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await self._batch_store.store.run(function, *arguments)


def window_seconds(text: str) -> int:
    """Seconds of a completion window such as 24h, which OpenAI's clients send."""
    match = re.fullmatch(r"([1-9][0-9]{0,4})([mhd])", text)
    seconds = int(match[1]) * SECONDS[match[2]] if match else 0
    if not 60 <= seconds <= LONGEST_WINDOW:
        raise Refusal("completion_window must be a duration such as 24h, between 1m and 7d.", param="completion_window")
    return seconds


async def _body(request: Request) -> CreateBatch:
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > LARGEST_BODY:
            raise Refusal(f"The request is longer than {LARGEST_BODY >> 10} KiB.", status=413)
    try:
        return msgspec.json.decode(data, type=CreateBatch)
    except msgspec.ValidationError as error:
        raise Refusal(f"{error}.", param=_field(str(error))) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise Refusal("The body is not valid JSON.") from None


def _field(message: str) -> str | None:
    """The name of the field in an error message of msgspec."""
    if match := re.search(r"(?:unknown|missing required) field `([^`]*)`", message):
        return match[1]
    match = re.search(r"at `\$\.?([^`]*)`", message)
    return match[1] if match else None


def _reply(batch: BatchRecord) -> BatchReply:
    return BatchReply(
        id=batch.id,
        endpoint=batch.endpoint,
        input_file_id=batch.input_file,
        completion_window=batch.completion_window,
        status=batch.status,
        created_at=batch.created_at,
        expires_at=batch.expires_at,
        request_counts=Counts(batch.total, batch.completed, batch.failed),
        metadata=msgspec.Raw(batch.metadata) if batch.metadata is not None else None,
        errors=BatchErrors(msgspec.Raw(batch.errors)) if batch.errors is not None else None,
        output_file_id=batch.output_file,
        error_file_id=batch.error_file,
        in_progress_at=batch.in_progress_at,
        finalizing_at=batch.finalizing_at,
        completed_at=batch.completed_at,
        failed_at=batch.failed_at,
        expired_at=batch.expired_at,
        cancelling_at=batch.cancelling_at,
        cancelled_at=batch.cancelled_at,
        usage=BatchUsage(
            batch.input_tokens,
            BatchInputDetails(batch.cached_tokens),
            batch.output_tokens,
            BatchOutputDetails(batch.reasoning_tokens),
            batch.input_tokens + batch.output_tokens,
        ),
    )
