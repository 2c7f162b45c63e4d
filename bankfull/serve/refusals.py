"""A call that is refused, and how OpenAI's APIs spell that."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from bankfull.errors import RequestError

log = logging.getLogger("bankfull.serve")

TYPES = {404: "not_found_error", 429: "rate_limit_error"}
Endpoint = Callable[[Request], Awaitable[Response]]


class Refusal(RequestError):
    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> bytes:
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def refusing(endpoint: Endpoint) -> Endpoint:
    """Every way to fail has OpenAI's shape; what nobody expected is logged under an id, and only the id is told."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except Refusal as error:
            body, status = error_body(error.status, str(error), error.param, error.code), error.status
        except RequestError as error:
            body, status = error_body(400, str(error)), 400
        except Exception as error:
            reference = secrets.token_hex(6)
            log.error("unexpected error %s", reference, exc_info=error)
            body = error_body(500, f"Something went wrong inside the server; its log has it under {reference}.")
            status = 500
        # Trying the very same call again cannot help, though clients take 5xx for that.
        headers = {"x-should-retry": "false"} if status == 507 else None
        return Response(body, status, headers, "application/json")

    return answer


def json_response(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
