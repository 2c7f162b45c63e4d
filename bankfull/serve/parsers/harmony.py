"""GPT-OSS: messages on channels. `analysis` is reasoning, `to=functions.name` is a call, everything else is text.

Reasoning is separated even if it was not requested, because channel markers mean nothing to a reader.
"""

from __future__ import annotations

import re

from bankfull.serve.parsers.reader import Markers, Sink, Steps
from bankfull.serve.parsers.session import Session

_BEGINNINGS = ("<|start|>", "<|channel|>")
_ENDINGS = ("<|end|>", "<|return|>", "<|call|>")
_MESSAGE = "<|message|>"
_BETWEEN = Markers([*_BEGINNINGS, *_ENDINGS])
_IN_HEADER = Markers(["<|start|>", _MESSAGE, *_ENDINGS])
_IN_BODY = Markers(["<|start|>", *_ENDINGS])
# Possessive quantifiers avoid catastrophic backtracking on a header of spaces.
_HEADER = re.compile(
    r"(?:<\|start\|>assistant)?+\s*+(?:to=functions\.(?P<before>[\w.\-]++))?+\s*+"
    r"(?:<\|channel\|>\s*+(?P<channel>analysis|commentary|final))?+\s*+"
    r"(?:to=functions\.(?P<behind>[\w.\-]++))?+\s*+(?:<\|constrain\|>)?+\s*+(?:json|code)?+\s*+"
)
_LONGEST_HEADER = 512


def read_harmony(session: Session) -> Steps[None]:
    reader, writer = session.reader, session.writer
    message_open = False
    marker = ""
    while True:
        marker = marker or (yield from reader.until(_BETWEEN, writer.text))
        if not marker:
            return
        header = (yield from _header(session, marker)) if marker in _BEGINNINGS else None
        if header is not None:
            message_open = True
            marker = yield from reader.until(_IN_BODY, _sink(session, header))
            continue
        if marker not in _ENDINGS or not message_open:
            writer.text(marker)
        message_open = False
        marker = ""


def _header(session: Session, marker: str) -> Steps[re.Match[str] | None]:
    """The header of a message, or None if there is none or it calls a tool that was not offered."""
    headers: list[re.Match[str]] = []

    def read(session: Session) -> Steps[bool]:
        pieces = [marker]
        if (yield from session.reader.until(_IN_HEADER, pieces.append)) != _MESSAGE:
            return False
        text = "".join(pieces)
        match = _HEADER.fullmatch(text) if len(text) <= _LONGEST_HEADER else None
        if match is None or not (_recipient(match) is None or session.may_start(_recipient(match) or "")):
            return False
        headers.append(match)
        return True

    return headers[0] if (yield from session.attempt(read)) else None


def _recipient(header: re.Match[str]) -> str | None:
    return header["before"] or header["behind"]


def _sink(session: Session, header: re.Match[str]) -> Sink:
    name = _recipient(header)
    if name is not None:
        session.start(name)
        return session.writer.arguments
    if header["channel"] == "analysis":
        session.writer.reasoning_begins()
        return session.writer.reasoning
    return session.writer.text
