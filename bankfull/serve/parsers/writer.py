"""Collects the events of a parser, and joins adjacent events of the same kind."""

from __future__ import annotations

from typing import Literal

from bankfull.serve.api.events import Event, Reasoning, Text, ToolArguments, ToolStart

_Kind = Literal["text", "reasoning", "arguments"]


class Trimmed:
    """Text whose trailing spaces are held back until the next piece decides whether they count."""

    def __init__(self) -> None:
        self._spaces: list[str] = []
        self._at_edge = False

    def add(self, piece: str) -> str:
        """Add a piece, and return the text that can be sent now."""
        if self._at_edge:
            piece = piece.lstrip()
            if not piece:
                return ""
            self._at_edge = False
        shown = piece.rstrip()
        if not shown:
            self._spaces.append(piece)
            return ""
        if self._spaces:
            shown = "".join(self._spaces) + shown
            self._spaces = []
        if piece[-1].isspace():
            self._spaces = [piece[len(piece.rstrip()) :]]
        return shown

    def edge(self) -> None:
        """Drop the spaces around this position, which only separate text from another kind of event."""
        self._spaces = []
        self._at_edge = True

    def rest(self) -> str:
        left = "".join(self._spaces)
        self._spaces = []
        return left


class EventWriter:
    def __init__(self) -> None:
        self.calls = 0
        self._events: list[Event] = []
        self._kind: _Kind | None = None
        self._pieces: list[str] = []
        self._text = Trimmed()
        self._reasoning = Trimmed()
        self._has_reasoning = False
        self._new_paragraph = False

    def text(self, piece: str) -> None:
        self._add("text", self._text.add(piece))

    def reasoning_begins(self) -> None:
        """Begin a block of reasoning; a later block starts a new paragraph."""
        self._text.edge()
        self._reasoning.edge()
        self._new_paragraph = self._has_reasoning

    def reasoning(self, piece: str) -> None:
        shown = self._reasoning.add(piece)
        if not shown:
            return
        if self._new_paragraph:
            shown = "\n\n" + shown
            self._new_paragraph = False
        self._has_reasoning = True
        self._add("reasoning", shown)

    def start(self, id: str, name: str) -> None:
        self._text.edge()
        self._flush()
        self._events.append(ToolStart(self.calls, id, name))
        self.calls += 1

    def arguments(self, piece: str) -> None:
        """Add to the arguments of the last call."""
        self._add("arguments", piece)

    def take(self) -> list[Event]:
        """The events since the last call."""
        self._flush()
        events, self._events = self._events, []
        return events

    def finish(self) -> list[Event]:
        self._add("text", self._text.rest())
        return self.take()

    def _add(self, kind: _Kind, piece: str) -> None:
        if not piece:
            return
        if kind is not self._kind:
            self._flush()
            self._kind = kind
        self._pieces.append(piece)

    def _flush(self) -> None:
        if self._kind is None:
            return
        whole = "".join(self._pieces)
        match self._kind:
            case "text":
                self._events.append(Text(whole))
            case "reasoning":
                self._events.append(Reasoning(whole))
            case "arguments":
                self._events.append(ToolArguments(self.calls - 1, whole))
        self._kind = None
        self._pieces = []
