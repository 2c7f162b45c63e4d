"""Errors of a call, independent of the API's format: a status, a sentence and a code, never a detail of the machine."""

from __future__ import annotations

import logging
import uuid
from dataclasses import dataclass

import msgspec

from bankfull.errors import RequestError
from bankfull.serve.engine.backend import Busy, DeadlineExceeded, EngineDied, Unavailable

log = logging.getLogger("bankfull.serve")

RESTART_SECONDS = 5


class Refusal(RequestError):
    """A refused call, with the fields of an error beside its sentence. `retry` False: a retry cannot help, although the
    status suggests it."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        retry: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.param, self.code, self.status, self.retry = param, code, status, retry


class ContextOverflow(Refusal):
    """The prompt and max_tokens do not fit into the model's context."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class GenerationFailed(RequestError):
    """The engine ended this one request. A reason means that the request itself is the cause, for example a grammar
    that allows no token."""

    def __init__(self, reason: str | None = None) -> None:
        super().__init__(reason or "The engine ended this request before it was done.")
        self.status = 500 if reason is None else 400


@dataclass(frozen=True, slots=True)
class Problem:
    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    retry_after: float | None = None
    retry: bool | None = None
    """False where a retry cannot help, although the status suggests it."""

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        headers = []
        if self.retry_after is not None:
            headers.append((b"retry-after", str(max(1, round(self.retry_after))).encode()))
        if self.retry is not None:
            headers.append((b"x-should-retry", b"true" if self.retry else b"false"))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        return headers


_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def problem_of(error: BaseException) -> Problem:
    """The error for the client; an unexpected one is logged under an id, and only the id is sent."""
    match error:
        case Refusal():
            kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
            return Problem(error.status, str(error), kind, error.param, error.code, retry=error.retry)
        case GenerationFailed():
            kind = "server_error" if error.status == 500 else "invalid_request_error"
            return Problem(error.status, str(error), kind, code="generation_failed", retry=False)
        case RequestError():
            return Problem(400, str(error), "invalid_request_error")
        case Busy():
            return Problem(429, str(error), "rate_limit_error", None, "rate_limit_exceeded", error.retry_after)
        case Unavailable():
            return Problem(503, str(error), "server_error", None, "engine_unavailable", RESTART_SECONDS)
        case EngineDied():
            return Problem(500, str(error), "server_error", None, "engine_died", RESTART_SECONDS)
        case DeadlineExceeded():
            return Problem(504, str(error), "server_error", "timeout", "deadline_exceeded", retry=False)
    reference = uuid.uuid4().hex[:12]
    log.error("unexpected error %s", reference, exc_info=error)
    return Problem(500, f"Something went wrong inside the server; its log has it under {reference}.", "server_error")


class ErrorBody(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(msgspec.Struct):
    """OpenAI's shape of every error."""

    error: ErrorBody


def openai_error(problem: Problem) -> bytes:
    body = ErrorBody(problem.message, problem.type, problem.param, problem.code)
    return msgspec.json.encode(ErrorReply(body))
