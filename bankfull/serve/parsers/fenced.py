"""Tool calls as JSON without the tags that the template shows: in a Markdown code fence, or as the whole answer.

JSON in a fence is an everyday answer, so it is a call only if it cannot be anything else: every object in the fence has
the name of an offered tool, an object of arguments, and no other key than those of a call. Until that is known nothing
is emitted, and JSON that turns out to be no call stays text; a foreign key or name decides early.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from bankfull.serve.parsers.json_calls import (
    ARGUMENT_KEYS,
    HEADER_KEYS,
    decoded,
    decoded_string,
    raw_value,
    read_colon,
)
from bankfull.serve.parsers.reader import Steps
from bankfull.serve.parsers.session import FENCE, CallBlock, Session

_LANGUAGE = re.compile(r"[^\s{\[<`]*+")
_LANGUAGES = ("", "json", "JSON", "xml", "tool_call")
_TAG, _END_TAG = "<tool_call>", "</tool_call>"


def fenced_calls(session: Session) -> Steps[bool]:
    """Read a fence behind its opening mark. A model may write its tags in there, too."""
    reader = session.reader
    if (yield from reader.word(_LANGUAGE)) not in _LANGUAGES:
        return False
    yield from reader.spaces()
    tagged = yield from reader.literal(_TAG)
    calls = yield from _whole_calls(session)
    if not calls:
        return False
    yield from reader.spaces()
    if tagged and (yield from reader.literal(_END_TAG)):
        yield from reader.spaces()
    if (yield from reader.peek()) and not (yield from reader.literal(FENCE)):
        return False
    _emit(session, calls)
    return True


def bare_calls(session: Session) -> Steps[bool]:
    """Read an answer that is nothing but calls."""
    calls = yield from _whole_calls(session)
    yield from session.reader.spaces()
    if not calls or (yield from session.reader.peek()):
        return False
    _emit(session, calls)
    return True


FENCED = CallBlock(FENCE, (), (fenced_calls,))


@dataclass(frozen=True, slots=True)
class _Call:
    name: str
    arguments: str
    end: int
    """The reader's position behind the call."""


def _emit(session: Session, calls: list[_Call]) -> None:
    """Where only one call may be made, what follows the first one is text."""
    reader, rest = session.reader, ""
    if len(calls) > 1 and not session.parallel:
        taken = reader.taken
        rest, calls = taken[len(taken) - (reader.position - calls[0].end) :], calls[:1]
    for call in calls:
        session.start(call.name)
        session.writer.arguments(call.arguments)
    session.writer.text(rest)


def _whole_calls(session: Session) -> Steps[list[_Call]]:
    """One object, a list, or several objects; nothing if anything there is no call."""
    reader = session.reader
    calls: list[_Call] = []
    yield from reader.spaces()
    in_list = yield from reader.literal("[")
    while True:
        yield from reader.spaces()
        call = yield from _whole_call(session)
        if call is None:
            return []
        calls.append(call)
        yield from reader.spaces()
        after = yield from reader.peek()
        if in_list and after in (",", "]"):
            reader.at += 1
            if after == "]":
                return calls
        elif in_list or after != "{":
            return [] if in_list else calls


def _whole_call(session: Session) -> Steps[_Call | None]:
    reader = session.reader
    if not (yield from reader.literal("{")):
        return None
    name: str | None = None
    arguments: str | None = None
    while True:
        yield from reader.spaces()
        key = yield from decoded_string(reader)
        if key not in HEADER_KEYS or not (yield from read_colon(reader)):
            return None
        first = yield from reader.peek()
        if key == "name":
            name = yield from decoded_string(reader)
            if name is None or not session.may_start(name):
                return None
        elif key in ARGUMENT_KEYS:
            arguments = (yield from raw_value(reader, first)) if first == "{" else None
            if arguments is None or not isinstance(decoded(arguments), dict):
                return None
        elif (yield from raw_value(reader, first)) is None:
            return None
        yield from reader.spaces()
        if not (yield from reader.literal(",")):
            break
    if not (yield from reader.literal("}")) or name is None or arguments is None:
        return None
    return _Call(name, arguments, reader.position)
