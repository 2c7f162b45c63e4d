"""The state that the parsers of all formats share while they read one sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bankfull.serve.api.events import Event
from bankfull.serve.parsers.reader import Markers, Sink, Steps, TextReader
from bankfull.serve.parsers.tools import MakeId, ToolSpec
from bankfull.serve.parsers.writer import EventWriter

FENCE = "```"
_WASTE_ALLOWANCE = 1 << 16
"""Characters that failed attempts may read, beyond a multiple of the text, before everything counts as text."""

ReadCalls = Callable[["Session"], Steps[bool]]
"""Reads tool calls at the current position; returns False, and writes nothing, if there are none."""


@dataclass(frozen=True, slots=True)
class CallBlock:
    """Tool calls between an opening marker and optional closing markers."""

    opening: str
    closings: tuple[str, ...]
    reads: tuple[ReadCalls, ...]
    """Parsers of the calls, tried in this order."""


class Session:
    def __init__(self, tools: Mapping[str, ToolSpec], parallel: bool, make_id: MakeId) -> None:
        self.reader = TextReader()
        self.writer = EventWriter()
        self.tools = tools
        self.parallel = parallel
        self._make_id = make_id

    def may_start(self, name: str) -> bool:
        return name in self.tools and (self.parallel or self.writer.calls == 0)

    def start(self, name: str) -> None:
        """Start a call; the text read so far cannot be rewound any more."""
        assert self.may_start(name)
        self.reader.release()
        self.writer.start(self._make_id(), name)

    def attempt(self, read: ReadCalls) -> Steps[bool]:
        """Read calls, or rewind and leave the text unread. Hostile text could fail after much reading again and again,
        so failed attempts may read only a few times the length of the text; after that everything is text."""
        reader, before = self.reader, self.writer.calls
        if reader.wasted > _WASTE_ALLOWANCE + 4 * reader.position:
            return False
        reader.mark()
        if (yield from read(self)):
            reader.release()
            return True
        assert self.writer.calls == before
        reader.rewind()
        return False

    def attempt_one_of(self, reads: tuple[ReadCalls, ...]) -> Steps[bool]:
        for read in reads:
            if (yield from self.attempt(read)):
                return True
        return False


class Parser:
    """An `OutputParser` that feeds pieces of text to a parsing generator."""

    wants_special_tokens = True

    def __init__(self, session: Session, reading: Callable[[Session], Steps[None]]) -> None:
        self._session = session
        self._steps = reading(session)
        next(self._steps, None)

    def push(self, text: str) -> list[Event]:
        self._session.reader.feed(text)
        next(self._steps, None)
        return self._session.writer.take()

    def finish(self) -> list[Event]:
        self._session.reader.ended = True
        next(self._steps, None)
        return self._session.writer.finish()


def read_answer(session: Session, blocks: tuple[CallBlock, ...], bare: tuple[ReadCalls, ...]) -> Steps[None]:
    """Read text with blocks of tool calls. `bare` parsers read calls without a marker at the beginning of the text.

    One closing marker is dropped per block, even after text that does not belong there; any other closing marker is
    text. A code fence that is text ends with a mark that opens no other one.
    """
    reader, lines = session.reader, LineStarts(session.writer.text)
    fence_open = False
    yield from session.attempt_one_of(bare)
    openings = {block.opening: block for block in blocks}
    words = [word for block in blocks for word in (block.opening, *block.closings)]
    if not words:
        yield from rest_as_text(session)
        return
    markers = Markers(words)
    expected: set[str] = set()
    while marker := (yield from reader.until(markers, lines.text)):
        if marker in expected:
            expected.discard(marker)
            continue
        block = openings.get(marker)
        if marker == FENCE and fence_open:
            fence_open = not lines.at_start
        elif block is not None and (yield from session.attempt_one_of(block.reads)):
            expected = set(block.closings)
            lines.at_start = True
            continue
        elif marker == FENCE:
            fence_open = lines.at_start
        lines.text(marker)


class LineStarts:
    """Passes text on, and knows whether it ends where a line begins."""

    def __init__(self, write: Sink) -> None:
        self.at_start = True
        self._write = write

    def text(self, piece: str) -> None:
        _, ended, last = piece.rpartition("\n")
        self.at_start = (bool(ended) or self.at_start) and not last.strip()
        self._write(piece)


def fence_end(session: Session) -> Steps[bool]:
    """Take the end of a Markdown code fence, if it comes next."""
    yield from session.reader.spaces()
    return (yield from session.reader.literal(FENCE))


def rest_as_text(session: Session) -> Steps[None]:
    reader, writer = session.reader, session.writer
    while True:
        writer.text(reader.text[reader.at :])
        reader.at = len(reader.text)
        if reader.ended:
            return
        yield
