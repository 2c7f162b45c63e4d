"""Tool calls in Python syntax, name(key=value, ...), with literal values.

A call is emitted only after it was read completely: only then is it known that all arguments are literals. Other code
is text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from bankfull.serve.parsers.reader import Steps, TextReader
from bankfull.serve.parsers.session import Session

_DEEPEST = 64
_NAME = re.compile(r"[A-Za-z0-9_.\-]*+")
_OUTSIDE = re.compile(r"[\w\s.,:=+\-]*+")
_INSIDE = {
    "'": re.compile(r"(?:[^'\\\n]++|\\.)*+", re.DOTALL),
    '"': re.compile(r'(?:[^"\\\n]++|\\.)*+', re.DOTALL),
}
_TOKEN = re.compile(
    r"""\s*+(?:
    (?P<string>"(?:[^"\\]++|\\.)*+"|'(?:[^'\\]++|\\.)*+')
    |(?P<number>[+-]?(?:\d++\.?\d*+|\.\d++)(?:[eE][+-]?\d++)?+)
    |(?P<word>[^\W\d]\w*+)
    |(?P<sign>[\[\](){}:,=])
    |(?P<end>\Z))""",
    re.VERBOSE | re.DOTALL,
)
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\\": "\\", "'": "'", '"': '"', "/": "/", "\n": ""}


def python_calls(session: Session) -> Steps[bool]:
    """Read calls on separate lines, in a list, or inside `print`."""
    reader = session.reader
    yield from reader.spaces()
    in_list = yield from reader.literal("[")
    if not (yield from _call(session)):
        return False
    while (yield from session.attempt(_another)):
        pass
    if in_list:
        yield from reader.spaces()
        yield from reader.literal("]")
    return True


def _another(session: Session) -> Steps[bool]:
    reader = session.reader
    yield from reader.spaces()
    if (yield from reader.peek()) in (",", ";"):
        reader.at += 1
    return (yield from _call(session))


def _call(session: Session) -> Steps[bool]:
    reader = session.reader
    yield from reader.spaces()
    name = yield from reader.word(_NAME)
    if not (yield from reader.literal("(")):
        return False
    printed = name == "print" and name not in session.tools
    if printed:
        yield from reader.spaces()
        name = yield from reader.word(_NAME)
        if not (yield from reader.literal("(")):
            return False
    name = name if name in session.tools else name.removesuffix(".call")
    if not session.may_start(name):
        return False
    source = yield from _up_to_parenthesis(reader)
    arguments = None if source is None else keyword_arguments(source)
    if printed:
        yield from reader.spaces()
        if not (yield from reader.literal(")")):
            return False
    if arguments is None:
        return False
    session.start(name)
    session.writer.arguments(arguments)
    return True


def _up_to_parenthesis(reader: TextReader) -> Steps[str | None]:
    """The source of the arguments, without the closing parenthesis."""
    pieces: list[str] = []
    depth = 0
    while True:
        yield from reader.run(_OUTSIDE, pieces.append)
        character = yield from reader.peek()
        if not character or character not in "[](){}'\"":
            return None
        reader.at += 1
        if character == ")" and depth == 0:
            return "".join(pieces)
        pieces.append(character)
        if character in _INSIDE:
            if not (yield from _string(reader, character, pieces)):
                return None
        else:
            depth += 1 if character in "[({" else -1


def _string(reader: TextReader, quote: str, pieces: list[str]) -> Steps[bool]:
    while True:
        match = _INSIDE[quote].match(reader.text, reader.at)
        assert match is not None
        pieces.append(match.group())
        reader.at = match.end()
        left = reader.text[reader.at : reader.at + 2]
        if left.startswith(quote):
            reader.at += 1
            pieces.append(quote)
            return True
        if reader.ended or left.startswith("\n"):
            return False
        yield


class _NotLiteral(Exception):
    pass


def keyword_arguments(source: str) -> str | None:
    """The JSON object of `key=value, ...`, or None if the source has another form."""
    tokens = _LiteralTokens(source)
    values: dict[str, Any] = {}
    try:
        while tokens.kind != "end":
            if tokens.kind != "word":
                return None
            key = tokens.take()
            tokens.expect("=")
            values[key] = _value(tokens, 0)
            if tokens.kind != "end":
                tokens.expect(",")
        return msgspec.json.encode(values).decode()
    except (_NotLiteral, UnicodeEncodeError):
        return None


class _LiteralTokens:
    def __init__(self, source: str) -> None:
        self._found = self._scan(source)
        self.kind, self.text = next(self._found)

    @staticmethod
    def _scan(source: str) -> Iterator[tuple[str, str]]:
        at = 0
        while match := _TOKEN.match(source, at):
            kind = match.lastgroup or "end"
            yield kind, match.group(kind)
            if kind == "end":
                return
            at = match.end()
        yield "other", ""

    def take(self) -> str:
        taken = self.text
        self.kind, self.text = next(self._found, ("other", ""))
        return taken

    def expect(self, sign: str) -> None:
        if self.kind != "sign" or self.take() != sign:
            raise _NotLiteral


def _value(tokens: _LiteralTokens, depth: int) -> Any:
    kind = tokens.kind
    if kind not in ("string", "number", "word", "sign") or depth > _DEEPEST:
        raise _NotLiteral
    text = tokens.take()
    if kind == "string":
        whole = _unescaped(text)
        while tokens.kind == "string":
            whole += _unescaped(tokens.take())
        return whole
    if kind == "number":
        return _number(text)
    if kind == "word":
        if text not in _WORDS:
            raise _NotLiteral
        return _WORDS[text]
    if text == "{":
        return _dictionary(tokens, depth)
    if text in ("[", "("):
        return _sequence(tokens, "]" if text == "[" else ")", depth)
    raise _NotLiteral


def _number(text: str) -> Any:
    """The number with its original digits if JSON allows them, so that nothing is rounded."""
    plain = text.removeprefix("+")
    return msgspec.Raw(plain) if re.fullmatch(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", plain) else float(text)


def _dictionary(tokens: _LiteralTokens, depth: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    while not (tokens.kind == "sign" and tokens.text == "}"):
        if tokens.kind != "string":
            raise _NotLiteral
        key = _unescaped(tokens.take())
        tokens.expect(":")
        values[key] = _value(tokens, depth + 1)
        if not (tokens.kind == "sign" and tokens.text == "}"):
            tokens.expect(",")
    tokens.take()
    return values


def _sequence(tokens: _LiteralTokens, closing: str, depth: int) -> list[Any]:
    values: list[Any] = []
    while not (tokens.kind == "sign" and tokens.text == closing):
        values.append(_value(tokens, depth + 1))
        if not (tokens.kind == "sign" and tokens.text == closing):
            tokens.expect(",")
    tokens.take()
    return values


def _unescaped(literal: str) -> str:
    def character(match: re.Match[str]) -> str:
        digits = match.group(1) or match.group(2)
        if digits:
            return chr(int(digits, 16))
        return _ESCAPED.get(match.group(3), match.group())

    # Join the two halves of a surrogate pair.
    text = _ESCAPE.sub(character, literal[1:-1])
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if "\\u" in literal else text
