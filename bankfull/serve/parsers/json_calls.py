"""Tool calls as JSON objects, {"name": ..., "arguments": {...}}: a single one, a list, or several in sequence.

Nothing is emitted before a known name and the start of its arguments were read; from then on arguments are streamed as
they arrive. Arguments that turn out to be invalid JSON are left as the model wrote them: a client must validate them
anyway, and sent events cannot be retracted.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from bankfull.serve.parsers.reader import Sink, Steps, TextReader
from bankfull.serve.parsers.session import ReadCalls, Session

ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
_SILENT_KEYS = frozenset({"id", "type"})
HEADER_KEYS = ARGUMENT_KEYS | _SILENT_KEYS | {"name"}
_BETWEEN = re.compile(r"[\w\s+\-.,:]*+")
_SCALAR = re.compile(r"[\w+\-.]*+")
_CONTROL = re.compile(r"[\x00-\x1f]")
_ESCAPES = {code: f"\\u{code:04x}" for code in range(0x20)} | {ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t"}


def json_calls(*closings: str, separators: str = ",") -> ReadCalls:
    """Read one object, a list, or several objects between separators. A closing marker outside a string ends unfinished
    arguments."""

    def read(session: Session) -> Steps[bool]:
        reader = session.reader
        yield from reader.spaces()
        in_list = yield from reader.literal("[")
        if in_list:
            yield from reader.spaces()
        if not (yield from call_object(session, closings)):
            return False
        following = _following(closings, "," if in_list else separators)
        while (yield from session.attempt(following)):
            pass
        if in_list:
            yield from reader.spaces()
            yield from reader.literal("]")
        return True

    return read


def _following(closings: tuple[str, ...], separators: str) -> ReadCalls:
    def read(session: Session) -> Steps[bool]:
        reader = session.reader
        yield from reader.spaces()
        if (yield from reader.peek()) not in (*separators, "{"):
            return False
        if reader.text[reader.at] != "{":
            reader.at += 1
            yield from reader.spaces()
        return (yield from call_object(session, closings))

    return read


def call_object(session: Session, closings: tuple[str, ...]) -> Steps[bool]:
    reader = session.reader
    if not (yield from reader.literal("{")):
        return False
    name: str | None = None
    arguments: str | None = None
    while True:
        yield from reader.spaces()
        if (yield from reader.literal("}")):
            break
        key = yield from decoded_string(reader)
        if key not in HEADER_KEYS or not (yield from read_colon(reader)):
            return False
        first = yield from reader.peek()
        if key == "name":
            name = yield from decoded_string(reader)
            if name is None or not session.may_start(name):
                return False
        elif key in ARGUMENT_KEYS and first == "{" and name is not None:
            session.start(name)
            if (yield from stream_object(session, closings)):
                yield from _rest_of_object(session)
            return True
        elif key in ARGUMENT_KEYS:
            arguments = yield from _deferred_arguments(reader, first)
            if arguments is None:
                return False
        elif (yield from raw_value(reader, first)) is None:
            return False
        yield from reader.spaces()
        if (yield from reader.peek()) not in (",", "}"):
            return False
        yield from reader.literal(",")
    if name is None:
        return False
    session.start(name)
    session.writer.arguments(arguments or "{}")
    return True


def stream_object(session: Session, closings: tuple[str, ...]) -> Steps[bool]:
    """Stream the next object as arguments; False if a closing marker or the end of the text came first. The marker is
    not taken, because the caller expects it."""
    reader, write = session.reader, session.writer.arguments
    depth = 0
    while True:
        depth = yield from _structure(reader, write, depth)
        if depth == 0:
            return True
        # This character is not valid JSON here: either a marker starts, or it is passed on.
        if not (yield from reader.peek()):
            return False
        for closing in closings:
            if (yield from _is_next(reader, closing)):
                return False
        write(reader.text[reader.at])
        reader.at += 1


def _structure(reader: TextReader, sink: Sink, depth: int) -> Steps[int]:
    """Take an object or list up to its end (return 0) or up to the first invalid character (return the depth there)."""
    while True:
        yield from reader.run(_BETWEEN, sink)
        character = yield from reader.peek()
        if character == '"':
            yield from reader.json_string(lambda piece: sink(_without_controls(piece)))
            continue
        if not character or character not in "{}[]":
            return depth
        reader.at += 1
        sink(character)
        depth += 1 if character in "{[" else -1
        if depth == 0:
            return 0


def _without_controls(piece: str) -> str:
    """Escape the control characters that models write into strings, which JSON forbids."""
    return piece.translate(_ESCAPES) if _CONTROL.search(piece) else piece


def _rest_of_object(session: Session) -> Steps[None]:
    """Read the rest of the object after its arguments, such as an id. Anything else stays text."""

    def read(session: Session) -> Steps[bool]:
        reader = session.reader
        while True:
            yield from reader.spaces()
            if (yield from reader.literal("}")):
                return True
            if not (yield from reader.literal(",")):
                return False
            yield from reader.spaces()
            key = yield from decoded_string(reader)
            if key not in _SILENT_KEYS or not (yield from read_colon(reader)):
                return False
            first = yield from reader.peek()
            if (yield from raw_value(reader, first)) is None:
                return False

    yield from session.attempt(read)


def read_colon(reader: TextReader) -> Steps[bool]:
    yield from reader.spaces()
    matched = yield from reader.literal(":")
    yield from reader.spaces()
    return matched


def decoded_string(reader: TextReader) -> Steps[str | None]:
    pieces: list[str] = []
    if not (yield from reader.json_string(pieces.append)):
        return None
    value = decoded("".join(pieces))
    return value if isinstance(value, str) else None


def _deferred_arguments(reader: TextReader, first: str) -> Steps[str | None]:
    """Arguments that cannot be streamed: their name comes later, or they are JSON inside a string."""
    raw = yield from raw_value(reader, first)
    if raw is None or first == "{":
        return raw
    value = decoded(raw)
    if value is None or value == "":
        return "{}" if raw in ("null", '""') else None
    return value if isinstance(value, str) and isinstance(decoded(value), dict) else None


def raw_value(reader: TextReader, first: str) -> Steps[str | None]:
    """The next value as it was written, or None if it is invalid."""
    pieces: list[str] = []
    if first == '"':
        return "".join(pieces) if (yield from reader.json_string(pieces.append)) else None
    if first and first in "{[":
        return "".join(pieces) if (yield from _structure(reader, pieces.append, 0)) == 0 else None
    yield from reader.run(_SCALAR, pieces.append)
    return "".join(pieces) or None


def _is_next(reader: TextReader, word: str) -> Steps[bool]:
    """Whether `word` comes next; it is not taken."""
    matched = yield from reader.literal(word)
    if matched:
        reader.at -= len(word)
    return matched


def decoded(text: str) -> Any:
    """The value of a JSON text, or None if it is invalid."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None


def escaped(text: str) -> str:
    """The text as the contents of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
