"""Llama 3: calls are the whole answer, as JSON objects, or stand behind <|python_tag|> and may be Python there."""

from __future__ import annotations

import re

from bankfull.serve.parsers.json_calls import escaped, json_calls
from bankfull.serve.parsers.pythonic import python_calls
from bankfull.serve.parsers.reader import Steps
from bankfull.serve.parsers.session import Block, Session

_INTERPRETERS = ("code_interpreter", "python", "ipython")
_ANYTHING = re.compile(r".*+", re.DOTALL)


def _code(session: Session) -> Steps[bool]:
    """Code for the interpreter, if one was offered as a tool: it has one argument, `code`."""
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
LLAMA_BLOCKS = (Block("<|python_tag|>", (), (_OBJECTS, python_calls, _code)),)
