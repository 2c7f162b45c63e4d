"""Text that arrives in pieces, read as if it were whole.

A parser is a generator: it yields when it needs more text than has come. What it decides may depend only on the text,
never on where a piece ends, so every primitive here waits until the text has settled its question.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

_Result = TypeVar("_Result")
Steps = Generator[None, None, _Result]
"""A reading that may have to wait; it yields whenever it does."""

Sink = Callable[[str], None]

SPACES = re.compile(r"\s*+")
_INSIDE_STRING = re.compile(r'(?:[^"\\]++|\\.)*+', re.DOTALL)


class Markers:
    """Strings to look for, all at once. None may begin with another: which one is found must not depend on pieces."""

    def __init__(self, words: Iterable[str]) -> None:
        self.words = tuple(dict.fromkeys(words))
        assert not any(a != b and a.startswith(b) for a in self.words for b in self.words), self.words
        self._pattern = re.compile("|".join(map(re.escape, self.words)))
        self._beginnings = frozenset(word[:size] for word in self.words for size in range(1, len(word)))
        self._longest = max(map(len, self.words)) - 1

    def search(self, text: str, start: int) -> re.Match[str] | None:
        return self._pattern.search(text, start)

    def unsettled(self, text: str, start: int) -> int:
        """How many of the last characters could be the beginning of a marker."""
        for size in range(min(self._longest, len(text) - start), 0, -1):
            if text[len(text) - size :] in self._beginnings:
                return size
        return 0


class Reader:
    """What has come and was not read yet. While a generator waits, that is at most the beginning of a marker: long
    text is never scanned or copied twice. Only `rewind` reads again, and `wasted` counts how much."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self.wasted = 0
        self._before = 0
        self._mark: int | None = None
        self._kept: list[str] = []

    @property
    def position(self) -> int:
        """Characters read since the beginning."""
        return self._before + self.at

    def feed(self, piece: str) -> None:
        if self._mark is not None:
            self._kept.append(self.text[self._mark : self.at])
            self._mark = 0
        self._before += self.at
        self.text = self.text[self.at :] + piece
        self.at = 0

    # -- going back

    def mark(self) -> None:
        """`rewind` will come back here."""
        self._mark = self.at
        self._kept = []

    def release(self) -> None:
        """What was read since the mark is settled."""
        self._mark = None
        self._kept = []

    def rewind(self) -> None:
        assert self._mark is not None
        kept = "".join(self._kept)
        self.wasted += len(kept) + self.at - self._mark
        if kept:
            assert self._mark == 0
            self.text = kept + self.text
            self._before -= len(kept)
        self.at = self._mark
        self.release()

    # -- primitives

    def peek(self) -> Steps[str]:
        """The next character, "" at the end of the text."""
        while self.at == len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.at]

    def literal(self, word: str) -> Steps[bool]:
        """Take `word` if it comes next."""
        while not self.text.startswith(word, self.at):
            if self.ended or not word.startswith(self.text[self.at : self.at + len(word)]):
                return False
            yield
        self.at += len(word)
        return True

    def run(self, pattern: re.Pattern[str], sink: Sink | None = None) -> Steps[None]:
        """Take all that comes and matches `pattern`, which must be a run of single characters."""
        while True:
            found = pattern.match(self.text, self.at)
            assert found is not None
            if sink is not None and found.end() > self.at:
                sink(found.group())
            self.at = found.end()
            if self.at < len(self.text) or self.ended:
                return
            yield

    def spaces(self) -> Steps[None]:
        yield from self.run(SPACES)

    def word(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Like `run`, but gives back what was taken."""
        pieces: list[str] = []
        yield from self.run(pattern, pieces.append)
        return "".join(pieces)

    def until(self, markers: Markers, sink: Sink) -> Steps[str]:
        """Pass on what comes before the first marker, and take that: which one it was, "" at the end of the text."""
        while True:
            found = markers.search(self.text, self.at)
            if found is not None:
                if found.start() > self.at:
                    sink(self.text[self.at : found.start()])
                self.at = found.end()
                return found.group()
            settled = len(self.text) - (0 if self.ended else markers.unsettled(self.text, self.at))
            if settled > self.at:
                sink(self.text[self.at : settled])
                self.at = settled
            if self.ended:
                return ""
            yield

    def json_string(self, sink: Sink) -> Steps[bool]:
        """Take a JSON string that comes next, with its quotes; False where it does not end."""
        if not (yield from self.literal('"')):
            return False
        sink('"')
        while True:
            found = _INSIDE_STRING.match(self.text, self.at)
            assert found is not None
            if found.end() > self.at:
                sink(found.group())
                self.at = found.end()
            if self.text.startswith('"', self.at):
                self.at += 1
                sink('"')
                return True
            if self.ended:
                # Nothing but a last backslash can be left.
                sink(self.text[self.at :])
                self.at = len(self.text)
                return False
            yield
