"""Reads text that arrives in pieces as if it were complete.

A parser is a generator that yields when it needs more text. Its decisions must depend only on the text and never on
where a piece ends, so every primitive here waits until the text decides its question.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

_Result = TypeVar("_Result")
Steps = Generator[None, None, _Result]
"""A parsing generator; it yields whenever it needs more text."""

Sink = Callable[[str], None]

SPACES = re.compile(r"\s*+")
_INSIDE_STRING = re.compile(r'(?:[^"\\]++|\\.)*+', re.DOTALL)


class Markers:
    """Strings that are searched together. None may be a prefix of another, because the match must not depend on the
    pieces."""

    def __init__(self, words: Iterable[str]) -> None:
        self.words = tuple(dict.fromkeys(words))
        assert not any(a != b and a.startswith(b) for a in self.words for b in self.words), self.words
        self._pattern = re.compile("|".join(map(re.escape, self.words)))
        self._prefixes = frozenset(word[:size] for word in self.words for size in range(1, len(word)))
        self._first = re.compile("|".join({re.escape(word[0]) for word in self.words}))
        self._longest = max(map(len, self.words)) - 1

    def search(self, text: str, start: int) -> re.Match[str] | None:
        return self._pattern.search(text, start)

    def possible_prefix(self, text: str, start: int) -> int:
        """The number of last characters that may be the start of a marker."""
        possible = self._first.search(text, max(start, len(text) - self._longest))
        if possible is None:
            return 0
        for begin in range(possible.start(), len(text)):
            if text[begin:] in self._prefixes:
                return len(text) - begin
        return 0


class TextReader:
    """The text that has arrived and was not read yet. While a generator waits, this is at most the start of a marker,
    so long text is never scanned or copied twice. Only `rewind` reads text again, and `wasted` counts how much."""

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
        """Characters read so far."""
        return self._before + self.at

    def feed(self, piece: str) -> None:
        if self._mark is not None:
            self._kept.append(self.text[self._mark : self.at])
            self._mark = 0
        self._before += self.at
        self.text = self.text[self.at :] + piece
        self.at = 0

    # -- rewinding

    def mark(self) -> None:
        """Set the position to which `rewind` returns."""
        self._mark = self.at
        self._kept = []

    def release(self) -> None:
        """Drop the mark."""
        self._mark = None
        self._kept = []

    @property
    def taken(self) -> str:
        """The text read since the mark."""
        assert self._mark is not None
        return "".join(self._kept) + self.text[self._mark : self.at]

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
        """The next character, or "" at the end of the text."""
        while self.at == len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.at]

    def literal(self, word: str) -> Steps[bool]:
        """Take `word` if it comes next, and return whether it did."""
        while not self.text.startswith(word, self.at):
            if self.ended or not word.startswith(self.text[self.at : self.at + len(word)]):
                return False
            yield
        self.at += len(word)
        return True

    def run(self, pattern: re.Pattern[str], sink: Sink | None = None) -> Steps[None]:
        """Take the longest run that matches `pattern`, which must be a repeated character class."""
        while True:
            match = pattern.match(self.text, self.at)
            assert match is not None
            if sink is not None and match.end() > self.at:
                sink(match.group())
            self.at = match.end()
            if self.at < len(self.text) or self.ended:
                return
            yield

    def spaces(self) -> Steps[None]:
        yield from self.run(SPACES)

    def word(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Take a run as `run` does, but return its text."""
        pieces: list[str] = []
        yield from self.run(pattern, pieces.append)
        return "".join(pieces)

    def until(self, markers: Markers, sink: Sink) -> Steps[str]:
        """Pass the text before the first marker to `sink`, take the marker and return it, or "" at the end of the
        text."""
        while True:
            match = markers.search(self.text, self.at)
            if match is not None:
                if match.start() > self.at:
                    sink(self.text[self.at : match.start()])
                self.at = match.end()
                return match.group()
            settled = len(self.text) - (0 if self.ended else markers.possible_prefix(self.text, self.at))
            if settled > self.at:
                sink(self.text[self.at : settled])
                self.at = settled
            if self.ended:
                return ""
            yield

    def json_string(self, sink: Sink) -> Steps[bool]:
        """Take the JSON string that comes next, with its quotes; False if it does not end."""
        if not (yield from self.literal('"')):
            return False
        sink('"')
        while True:
            match = _INSIDE_STRING.match(self.text, self.at)
            assert match is not None
            if match.end() > self.at:
                sink(match.group())
                self.at = match.end()
            if self.text.startswith('"', self.at):
                self.at += 1
                sink('"')
                return True
            if self.ended:
                # Only a last backslash can be left.
                sink(self.text[self.at :])
                self.at = len(self.text)
                return False
            yield
