"""HTTP client of the command line for a running bankfull server."""

from __future__ import annotations

import http.client
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, urlsplit

from bankfull.errors import ConfigError, RequestError

TIMEOUT = 60.0
CHUNK = 1 << 20
KEY_VARIABLE = "BANKFULL_API_KEY"


class Service:
    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is not the address of a server; use for example http://127.0.0.1:8000.")
        try:
            self._port = parts.port
        except ValueError:
            raise ConfigError(f"{url!r} has no valid port.") from None
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._url = parts.hostname, url
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {} if body is None else {"content-type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        return _document(self._answer(method, path, data, headers).read())

    def upload(self, file: Path) -> Any:
        """Upload a file as a stream: it is never held in memory."""
        try:
            stream, size = file.open("rb"), file.stat().st_size
        except OSError as error:
            raise ConfigError(f"The input {file} cannot be read: {error.strerror or error}.") from None
        border, name = secrets.token_hex(16), quote(file.name, safe=" ()[]{}@+,;=~!$&'")
        head = (
            f'--{border}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--{border}\r\ncontent-disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
        ).encode()
        tail = f"\r\n--{border}--\r\n".encode()
        headers = {
            "content-type": f"multipart/form-data; boundary={border}",
            "content-length": str(len(head) + size + len(tail)),
        }
        with stream:
            answer = self._answer("POST", "/v1/files", _chunks(head, stream, tail), headers)
            return _document(answer.read())

    def download(self, id: str, target: IO[bytes]) -> None:
        answer = self._answer("GET", f"/v1/files/{quote(id, safe='')}/content", None, {})
        while data := answer.read(CHUNK):
            target.write(data)

    def _answer(
        self, method: str, path: str, body: bytes | Iterator[bytes] | None, headers: dict[str, str]
    ) -> http.client.HTTPResponse:
        key = os.environ.get(KEY_VARIABLE, "")
        if key:
            headers = {**headers, "authorization": f"Bearer {key}"}
        connection = self._kind(self._host, self._port, timeout=TIMEOUT)
        try:
            with suppress(
                BrokenPipeError, ConnectionResetError
            ):  # refused before the whole body was sent: the response has the reason
                connection.request(method, self._prefix + path, body, headers)
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException, UnicodeEncodeError, ValueError) as error:
            reason = " ".join(str(getattr(error, "strerror", None) or error or type(error).__name__).split())
            raise ConfigError(
                f"The server at {self._url} cannot be reached ({reason}); start one with `bankfull serve`."
            ) from None
        if answer.status >= 400:
            raise RequestError(_problem(answer.status, answer.read(CHUNK)))
        return answer


def _chunks(head: bytes, stream: IO[bytes], tail: bytes) -> Iterator[bytes]:
    yield head
    while data := stream.read(CHUNK):
        yield data
    yield tail


def _document(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        raise RequestError("The server's response is not JSON; is it a bankfull server?") from None


def _problem(status: int, data: bytes) -> str:
    try:
        return str(json.loads(data)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"The server refused the call with status {status}."
