"""An answer as a row of blocks, for the APIs that keep text, thoughts and calls apart and in their order.

Whole and streamed answers are spelled from the same blocks, so they cannot differ.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from bankfull.serve.api.events import Event, Finish, Reasoning, Text, ToolArguments, ToolStart, Turn

Kind = Literal["text", "reasoning", "call"]
TokenLine = tuple[int, dict[int, tuple[float, str]]]
"""A chosen token, and at its position: token -> (log-probability, text)."""


@dataclass(slots=True)
class Block:
    index: int
    kind: Kind
    id: str = ""
    name: str = ""
    """Of a call: its id and the tool's name."""
    pieces: list[str] = field(default_factory=list)
    lines: list[TokenLine] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Of a call: its arguments as a JSON text."""
        return "".join(self.pieces)


@dataclass(slots=True)
class Began:
    block: Block


@dataclass(slots=True)
class Grew:
    block: Block
    text: str
    lines: list[TokenLine]


@dataclass(slots=True)
class Ended:
    """Before the next block begins, or with the answer itself."""

    block: Block


Change = Began | Grew | Ended


class Blocks:
    """One sample's blocks. At most one is open: the arguments of a call come before anything else begins."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self.finish: Finish | None = None
        self._open: Block | None = None
        self._unsaid: list[TokenLine] = []

    @property
    def open(self) -> Block | None:
        return self._open

    @property
    def cut_short(self) -> bool:
        """Whether the last block ended for want of tokens."""
        return self.finish is not None and self.finish.reason == "length"

    def add(self, turn: Turn) -> list[Change]:
        """What this turn changes, in order."""
        changes: list[Change] = []
        if turn.logprobs:
            self._unsaid += zip(turn.tokens, turn.logprobs, strict=False)
        for event in turn.events:
            self._take(event, changes)
        if turn.finish is not None:
            self.finish = turn.finish
            if self._unsaid and self._open is not None and self._open.kind == "text":
                self._grow("", changes)  # tokens that end an answer have no text of their own
            self._close(changes)
        return changes

    def _take(self, event: Event, changes: list[Change]) -> None:
        match event:
            case Text(text):
                self._say("text", text, changes)
            case Reasoning(text):
                self._say("reasoning", text, changes)
            case ToolStart(_, id, name):
                self._begin("call", changes, id, name)
            case ToolArguments(_, text):
                self._grow(text, changes)

    def _say(self, kind: Kind, text: str, changes: list[Change]) -> None:
        if self._open is None or self._open.kind != kind:
            # A later thought comes as a paragraph; as a block of its own it needs no empty lines before it.
            text = text.lstrip("\n") if kind == "reasoning" else text
            if not text:
                return
            self._begin(kind, changes)
        self._grow(text, changes)

    def _begin(self, kind: Kind, changes: list[Change], id: str = "", name: str = "") -> None:
        self._close(changes)
        self._open = Block(len(self.all), kind, id, name)
        self.all.append(self._open)
        changes.append(Began(self._open))

    def _grow(self, text: str, changes: list[Change]) -> None:
        block = self._open
        assert block is not None
        # Log-probabilities belong to visible text; those of thoughts and calls are not told.
        lines, self._unsaid = (self._unsaid if block.kind == "text" else []), []
        block.pieces.append(text)
        block.lines += lines
        changes.append(Grew(block, text, lines))

    def _close(self, changes: list[Change]) -> None:
        if self._open is not None:
            changes.append(Ended(self._open))
            self._open = None
