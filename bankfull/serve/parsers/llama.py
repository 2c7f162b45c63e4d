"""Llama 3: the whole output is calls as JSON objects, or they follow <|python_tag|>, where they may be Python."""

from __future__ import annotations

import re

from bankfull.serve.parsers.json_calls import escaped, json_calls
from bankfull.serve.parsers.pythonic import python_calls
from bankfull.serve.parsers.reader import Steps
from bankfull.serve.parsers.session import CallBlock, Session

_INTERPRETERS = ("code_interpreter", "python", "ipython")
_ANYTHING = re.compile(r".*+", re.DOTALL)


def _code(session: Session) -> Steps[bool]:
    """Read code for the interpreter, if it was offered as a tool; its only argument is `code`."""
    name = next((name for name in _INTERPRETERS if session.may_start(name)), None)
    if name is None:
        return False
    session.start(name)
    write = session.writer.arguments
    write('{"code": "')
    yield from session.reader.run(_ANYTHING, lambda piece: write(escaped(piece)))
    write('"}')
    return True


_OBJECTS = json_calls(separators=";,")
LLAMA_BARE = (_OBJECTS, python_calls)
LLAMA_BLOCKS = (CallBlock("<|python_tag|>", (), (_OBJECTS, python_calls, _code)),)
