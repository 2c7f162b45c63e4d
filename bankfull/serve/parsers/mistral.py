"""Mistral: [TOOL_CALLS] followed by a list of objects, or by each call as name{...} or name[ARGS]{...}."""

from __future__ import annotations

import re

from bankfull.serve.parsers.json_calls import json_calls, stream_object
from bankfull.serve.parsers.reader import Steps
from bankfull.serve.parsers.session import CallBlock, Session

_NAME = re.compile(r"[\w.\-]*+")


def _named(session: Session) -> Steps[bool]:
    reader = session.reader
    yield from reader.spaces()
    name = yield from reader.word(_NAME)
    if not session.may_start(name):
        return False
    if (yield from reader.literal("[CALL_ID]")):
        yield from reader.word(_NAME)
    yield from reader.literal("[ARGS]")
    yield from reader.spaces()
    if (yield from reader.peek()) != "{":
        return False
    session.start(name)
    yield from stream_object(session, ())
    return True


MISTRAL_BLOCKS = (CallBlock("[TOOL_CALLS]", (), (json_calls(), _named)),)
