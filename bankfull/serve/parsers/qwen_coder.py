"""Qwen3-Coder: <function=name> around <parameter=key>value</parameter>. A value is text that the tool's schema gives a
type. Strings are streamed, any other value is sent when it is complete."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from bankfull.serve.parsers.json_calls import decoded, escaped, json_calls
from bankfull.serve.parsers.reader import Markers, Steps
from bankfull.serve.parsers.session import CallBlock, Session

_NAME = re.compile(r"[^<>\s]*+")
_VALUE_ENDS = Markers(["\n</parameter>", "</parameter>"])
_WORDS = {"True": "true", "False": "false", "None": "null"}
_CLOSING = "</tool_call>"


def _function(session: Session) -> Steps[bool]:
    yield from session.reader.spaces()
    if not (yield from session.reader.literal("<function=")):
        return False
    return (yield from _call(session))


def _call(session: Session) -> Steps[bool]:
    reader = session.reader
    name = yield from reader.word(_NAME)
    if not (yield from reader.literal(">")) or not session.may_start(name):
        return False
    properties = session.tools[name].parameters.get("properties")
    schemas = properties if isinstance(properties, Mapping) else {}
    session.start(name)
    write = session.writer.arguments
    write("{")
    separator = ""
    while True:
        yield from reader.spaces()
        if (yield from reader.literal("<parameter=")):
            key = yield from reader.word(_NAME)
            yield from reader.literal(">")
            write(f'{separator}"{escaped(key)}": ')
            separator = ", "
            if not (yield from _value(session, types_of(schemas.get(key)))):
                return True
        elif (yield from reader.literal("</function>")) or (yield from reader.peek()):
            write("}")
            return True
        else:
            # The text was truncated: leave the arguments incomplete.
            return True


def _value(session: Session, types: frozenset[str]) -> Steps[bool]:
    """Write one value; False if it does not end."""
    reader, write = session.reader, session.writer.arguments
    yield from reader.literal("\n")
    if types <= {"string"}:
        write('"')
        if not (yield from reader.until(_VALUE_ENDS, lambda piece: write(escaped(piece)))):
            return False
        write('"')
        return True
    pieces: list[str] = []
    ended = yield from reader.until(_VALUE_ENDS, pieces.append)
    write(as_json("".join(pieces), types))
    return bool(ended)


def types_of(schema: Any) -> frozenset[str]:
    """The JSON types that a schema declares at its top level."""
    if not isinstance(schema, Mapping):
        return frozenset()
    kinds = schema.get("type")
    types = {kinds} if isinstance(kinds, str) else set(filter(_is_text, kinds)) if isinstance(kinds, list) else set()
    for key in ("anyOf", "oneOf"):
        choices = schema.get(key)
        for choice in choices if isinstance(choices, list) else ():
            kind = choice.get("type") if isinstance(choice, Mapping) else None
            types |= {kind} if isinstance(kind, str) else set()
    return frozenset(types)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def as_json(text: str, types: frozenset[str]) -> str:
    """The value if it has one of the types, otherwise a string: output of the model is never dropped."""
    plain = text.strip()
    plain = _WORDS.get(plain, plain)
    value = decoded(plain)
    kinds = {
        type(None): {"null"},
        bool: {"boolean"},
        int: {"integer", "number"},
        float: {"number"},
        list: {"array"},
        dict: {"object"},
    }.get(type(value), set())
    if kinds & types and (value is not None or plain == "null"):
        return plain
    return f'"{escaped(text)}"'


QWEN_CODER_BLOCKS = (
    CallBlock("<tool_call>", (_CLOSING,), (_function, json_calls(_CLOSING))),
    CallBlock("<function=", (_CLOSING,), (_call,)),
)
