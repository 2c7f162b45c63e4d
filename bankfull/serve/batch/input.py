"""The input file of a batch: one request per line, validated while the file is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from bankfull.serve.api.calls import refuse_crowd
from bankfull.serve.api.errors import Refusal
from bankfull.serve.data.batch_store import BatchLine, LineProblem

MOST_LINES = 50_000
MOST_BODY_BYTES = 4 << 20
"""Default limit for the body of one request, in bytes; the server passes its limit for online calls."""
LINE_OVERHEAD = 8192
"""Bytes of a line besides its body: `custom_id`, `url` and the field names."""
MOST_PROBLEMS = 100
VALIDATED_TOGETHER = 1000
GROUP_LINES, GROUP_BYTES = 32, 1 << 20
ENDPOINTS = ("/v1/chat/completions", "/v1/responses", "/v1/completions", "/v1/embeddings")


class _Request(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


class _Invalid(Exception):
    def __init__(self, message: str, code: str, line: int, param: str | None = None) -> None:
        self.problem = LineProblem(code, message, line, param)


class _Body(msgspec.Struct):
    """The part of a body that validation checks; the endpoint checks the rest when the line runs."""

    stream: bool | None = None


_requests = msgspec.json.Decoder(_Request)
_bodies = msgspec.json.Decoder(_Body)


def grouped(lines: list[BatchLine]) -> Iterator[list[BatchLine]]:
    """Split lines into consecutive groups whose bodies may be in memory at once."""
    group: list[BatchLine] = []
    size = 0
    for line in lines:
        if group and (len(group) == GROUP_LINES or size + line.length > GROUP_BYTES):
            yield group
            group, size = [], 0
        group.append(line)
        size += line.length
    if group:
        yield group


def read_bodies(path: Path, lines: list[BatchLine]) -> list[bytes]:
    """The bodies of validated lines."""
    bodies = []
    with path.open("rb") as file:
        for line in lines:
            file.seek(line.start)
            bodies.append(bytes(_requests.decode(file.read(line.length)).body))
    return bodies


class Validation:
    """`groups()` yields the valid lines in groups of VALIDATED_TOGETHER; afterwards `problems` lists the errors in the
    others."""

    def __init__(
        self, path: Path, endpoint: str, most_lines: int = MOST_LINES, most_body_bytes: int = MOST_BODY_BYTES
    ) -> None:
        self._path, self._endpoint, self._most_lines = path, endpoint, most_lines
        self._most_body_bytes, self._longest_line = most_body_bytes, most_body_bytes + LINE_OVERHEAD
        self._first_lines: dict[str, int] = {}
        self.problems: list[LineProblem] = []

    def groups(self) -> Iterator[list[BatchLine]]:
        group: list[BatchLine] = []
        count = 0
        for number, start, text in self._texts():
            count += 1
            if count > self._most_lines:
                many = f"The file has more than {self._most_lines} requests; split it."
                self.problems.append(LineProblem("too_many_requests", many))
                return
            try:
                group.append(self._checked(number, start, text))
            except _Invalid as error:
                self.problems.append(error.problem)
            if len(self.problems) >= MOST_PROBLEMS:
                return
            if len(group) == VALIDATED_TOGETHER:
                yield group
                group = []
        if not count:
            self.problems.append(LineProblem("empty_file", "The file contains no requests."))
        if group:
            yield group

    def _texts(self) -> Iterator[tuple[int, int, bytes]]:
        """The 1-based number, the byte offset and the text of every line that is not blank."""
        with self._path.open("rb") as file:
            number = start = 0
            while text := file.readline(self._longest_line + 1):
                number += 1
                if text.strip():
                    yield number, start, text
                start += len(text)
                # skip the rest of a line that is too long
                while len(text) > self._longest_line and not text.endswith(b"\n"):
                    text = file.readline(self._longest_line + 1)
                    start += len(text)

    def _checked(self, number: int, start: int, text: bytes) -> BatchLine:
        if len(text) > self._longest_line:
            raise _Invalid(f"The line is longer than {self._longest_line} bytes.", "line_too_long", number)
        try:
            request = _requests.decode(text)
        except msgspec.ValidationError as error:
            raise _Invalid(_sentence(error), "invalid_request", number) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise _Invalid("The line is not valid JSON.", "invalid_json_line", number) from None
        if request.url != self._endpoint:
            message = f"The url must be the endpoint of the batch, {self._endpoint}."
            raise _Invalid(message, "mismatched_url", number, "url")
        if (first := self._first_lines.setdefault(request.custom_id, number)) != number:
            message = f"The custom_id is already used in line {first}."
            raise _Invalid(message, "duplicate_custom_id", number, "custom_id")
        try:
            if len(request.body) > self._most_body_bytes:
                message = f"The body is larger than {self._most_body_bytes} bytes."
                raise _Invalid(message, "body_too_large", number, "body")
            refuse_crowd(bytes(request.body))
            body = _bodies.decode(request.body)
        except Refusal as error:
            raise _Invalid(str(error), error.code or "invalid_body", number, "body") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            message = f"The body is not a valid request: {_sentence(error)}"
            raise _Invalid(message, "invalid_body", number, "body") from None
        if body.stream:
            raise _Invalid("A request in a batch cannot stream.", "invalid_body", number, "body.stream")
        return BatchLine(number, request.custom_id, start, len(text))


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    return text if text.endswith(".") else f"{text}."
