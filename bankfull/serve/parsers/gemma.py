"""Gemma: a code fence of Python or JSON (Gemma 3), or call:name{key:value} between markers, with special quotation
marks (FunctionGemma, Gemma 4)."""

from __future__ import annotations

import re

from bankfull.serve.parsers.json_calls import decoded, escaped, json_calls
from bankfull.serve.parsers.pythonic import python_calls
from bankfull.serve.parsers.reader import Markers, Sink, Steps, TextReader
from bankfull.serve.parsers.session import FENCE, CallBlock, ReadCalls, Session, fence_end

_NAME = re.compile(r"[\w.\-]*+")
_KEY = re.compile(r"[^:{}\[\],<\s]*+")
_SCALAR = re.compile(r"[^{}\[\],<]*+")
_DEEPEST = 64


def _fenced(read: ReadCalls) -> ReadCalls:
    def read_fence(session: Session) -> Steps[bool]:
        if not (yield from read(session)):
            return False
        yield from session.attempt(fence_end)
        return True

    return read_fence


def _marked_calls(quote: str) -> ReadCalls:
    def read(session: Session) -> Steps[bool]:
        reader = session.reader
        yield from reader.spaces()
        if not (yield from reader.literal("call:")):
            return False
        name = yield from reader.word(_NAME)
        if not session.may_start(name) or (yield from reader.peek()) != "{":
            return False
        session.start(name)
        yield from _value(reader, session.writer.arguments, quote, Markers([quote]), 0)
        return True

    return read


def _value(reader: TextReader, write: Sink, quote: str, quotes: Markers, depth: int) -> Steps[bool]:
    """Write the next value as JSON; False if it is invalid, which ends the arguments."""
    if (yield from reader.literal(quote)):
        write('"')
        if not (yield from reader.until(quotes, lambda piece: write(escaped(piece)))):
            return False
        write('"')
        return True
    opening = yield from reader.peek()
    if opening not in ("{", "["):
        text = (yield from reader.word(_SCALAR)).strip()
        write(text if decoded(text) is not None or text == "null" else f'"{escaped(text)}"')
        return bool((yield from reader.peek()))
    if depth == _DEEPEST:
        return False
    closing = "}" if opening == "{" else "]"
    reader.at += 1
    write(opening)
    separator = ""
    while True:
        yield from reader.spaces()
        if (yield from reader.literal(closing)):
            write(closing)
            return True
        if separator and not (yield from reader.literal(",")):
            return False
        write(separator)
        separator = ", "
        yield from reader.spaces()
        if opening == "{" and not (yield from _key(reader, write, quote)):
            return False
        if not (yield from _value(reader, write, quote, quotes, depth + 1)):
            return False


def _key(reader: TextReader, write: Sink, quote: str) -> Steps[bool]:
    pieces: list[str] = []
    if (yield from reader.literal(quote)):
        yield from reader.until(Markers([quote]), pieces.append)
    else:
        yield from reader.run(_KEY, pieces.append)
    write(f'"{escaped("".join(pieces))}"')
    yield from reader.spaces()
    if not (yield from reader.literal(":")):
        return False
    write(": ")
    yield from reader.spaces()
    return True


GEMMA_BARE = (json_calls(), python_calls)
GEMMA_BLOCKS = (
    CallBlock("```tool_code", (), (_fenced(python_calls),)),
    CallBlock("```json", (), (_fenced(json_calls(FENCE)),)),
)
FUNCTION_GEMMA_BLOCKS = (CallBlock("<start_function_call>", ("<end_function_call>",), (_marked_calls("<escape>"),)),)
GEMMA4_BLOCKS = (CallBlock("<|tool_call>", ("<tool_call|>",), (_marked_calls('<|"|>'),)),)
