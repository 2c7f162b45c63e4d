"""What the readers of all formats share while they read one sample's text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bankfull.serve.api.events import Event
from bankfull.serve.parsers.reader import Markers, Reader, Steps
from bankfull.serve.parsers.tools import MakeId, Tool
from bankfull.serve.parsers.writer import Writer

_PATIENCE = 1 << 16

ReadCalls = Callable[["Session"], Steps[bool]]
"""Reads calls from here on; False if there was none, and then nothing was written."""


@dataclass(frozen=True, slots=True)
class Block:
    """Calls that stand behind a marker, and perhaps before others."""

    opening: str
    closings: tuple[str, ...]
    reads: tuple[ReadCalls, ...]
    """Tried in this order."""


class Session:
    def __init__(self, tools: Mapping[str, Tool], parallel: bool, make_id: MakeId) -> None:
        self.reader = Reader()
        self.writer = Writer()
        self.tools = tools
        self._parallel = parallel
        self._make_id = make_id

    def may_start(self, name: str) -> bool:
        return name in self.tools and (self._parallel or self.writer.calls == 0)

    def start(self, name: str) -> None:
        """From here on the text is a call: there is no way back."""
        assert self.may_start(name)
        self.reader.release()
        self.writer.start(self._make_id(), name)

    def attempt(self, read: ReadCalls) -> Steps[bool]:
        """Read calls, or leave the text unread. Hostile text could fail again and again after much reading; readings
        that failed may cost no more than a few times what has come, after that all is text."""
        reader, before = self.reader, self.writer.calls
        if reader.wasted > _PATIENCE + 4 * reader.position:
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
    """Runs a reading over the pieces as they come: an `OutputParser`."""

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


def read_answer(session: Session, blocks: tuple[Block, ...], bare: tuple[ReadCalls, ...]) -> Steps[None]:
    """Text with blocks of calls in it. `bare` read calls that may stand at its beginning without a marker.

    A closing marker is dropped once per block of calls, also behind text that does not belong there; any other is text.
    """
    reader, writer = session.reader, session.writer
    yield from session.attempt_one_of(bare)
    openings = {block.opening: block for block in blocks}
    words = [word for block in blocks for word in (block.opening, *block.closings)]
    if not words:
        yield from rest_as_text(session)
        return
    markers = Markers(words)
    expected: set[str] = set()
    while marker := (yield from reader.until(markers, writer.text)):
        if marker in expected:
            expected.discard(marker)
            continue
        block = openings.get(marker)
        if block is not None and (yield from session.attempt_one_of(block.reads)):
            expected = set(block.closings)
        else:
            writer.text(marker)


def rest_as_text(session: Session) -> Steps[None]:
    reader, writer = session.reader, session.writer
    while True:
        writer.text(reader.text[reader.at :])
        reader.at = len(reader.text)
        if reader.ended:
            return
        yield
