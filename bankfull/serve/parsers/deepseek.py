"""DeepSeek: each call is enclosed in markers, with a separator after its name; R1 and the first V3 put the arguments
into a code fence."""

from __future__ import annotations

import re

from bankfull.serve.parsers.json_calls import stream_object
from bankfull.serve.parsers.reader import Steps
from bankfull.serve.parsers.session import FENCE, CallBlock, Session, fence_end

CALLS_BEGIN = "<｜tool▁calls▁begin｜>"
_CALLS_END = "<｜tool▁calls▁end｜>"
_CALL_BEGIN = "<｜tool▁call▁begin｜>"
_CALL_END = "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_NAME = re.compile(r"[\w.\-]*+")
_CLOSINGS = (_CALL_END, _CALLS_END)


def _first(session: Session) -> Steps[bool]:
    yield from session.reader.spaces()
    if not (yield from session.reader.literal(_CALL_BEGIN)):
        return False
    return (yield from _call(session))


def _call(session: Session) -> Steps[bool]:
    reader = session.reader
    yield from reader.spaces()
    name = yield from reader.word(_NAME)
    if not (yield from reader.literal(_SEPARATOR)):
        return False
    yield from reader.spaces()
    if fenced := (yield from reader.peek()) != "{":
        if name != "function":
            return False
        name = yield from reader.word(_NAME)
        yield from reader.spaces()
        if not (yield from reader.literal(FENCE + "json")):
            return False
        yield from reader.spaces()
    if not session.may_start(name) or (yield from reader.peek()) != "{":
        return False
    session.start(name)
    yield from stream_object(session, (FENCE, *_CLOSINGS) if fenced else _CLOSINGS)
    if fenced:
        yield from session.attempt(fence_end)
    return True


DEEPSEEK_BLOCKS = (
    CallBlock(CALLS_BEGIN, _CLOSINGS, (_first,)),
    CallBlock(_CALL_BEGIN, _CLOSINGS, (_call,)),
)
