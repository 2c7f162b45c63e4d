"""An answer as a list of blocks, for the APIs that separate text, reasoning and tool calls, in their order.

Whole and streamed answers are made from the same blocks, so they cannot differ.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal

from bankfull.outputs import Delta, Logprob
from bankfull.serve.api.chat import Answer
from bankfull.serve.api.events import Event, Reasoning, Text, ToolArguments, ToolStart, Turn

Kind = Literal["text", "reasoning", "call"]
ChosenToken = tuple[int, dict[int, Logprob]]
"""A chosen token, and the log-probabilities at its position by token id."""


@dataclass(slots=True)
class AnswerBlock:
    index: int
    kind: Kind
    id: str = ""
    name: str = ""
    """The id of a call, and the name of its tool."""
    pieces: list[str] = field(default_factory=list)
    lines: list[ChosenToken] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text; for a call, its arguments as JSON."""
        return "".join(self.pieces)


@dataclass(slots=True)
class Began:
    block: AnswerBlock


@dataclass(slots=True)
class Grew:
    block: AnswerBlock
    text: str
    lines: list[ChosenToken]


@dataclass(slots=True)
class Ended:
    """A block has ended: before the next one begins, or with the answer."""

    block: AnswerBlock


Change = Began | Grew | Ended


class Blocks:
    """One sample's blocks. At most one is open: the arguments of a call are complete before the next block begins."""

    def __init__(self) -> None:
        self.all: list[AnswerBlock] = []
        self.end: Delta | None = None
        """The sample's last delta, which has its finish reason."""
        self._open: AnswerBlock | None = None
        self._unsaid: list[ChosenToken] = []

    @property
    def open(self) -> AnswerBlock | None:
        return self._open

    @property
    def cut_short(self) -> bool:
        """Whether max_tokens ended the last block."""
        return self.end is not None and self.end.finish_reason == "length"

    def add(self, turn: Turn) -> list[Change]:
        """The changes of this turn, in order."""
        changes: list[Change] = []
        delta, events = turn
        if delta.logprobs:
            self._unsaid += zip(delta.token_ids, delta.logprobs, strict=False)
        for event in events:
            self._take(event, changes)
        if delta.finish_reason is not None:
            self.end = delta
            if self._unsaid and self._open is not None and self._open.kind == "text":
                self._grow("", changes)  # the tokens that end an answer have no text
            self._close(changes)
        return changes

    async def add_all(self, answer: Answer) -> None:
        """The whole answer; it is closed however that ends."""
        async with aclosing(answer):
            async for turns in answer:
                for turn in turns:
                    self.add(turn)

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
            # Later reasoning comes as a new paragraph; a block of its own needs no empty lines before it.
            text = text.lstrip("\n") if kind == "reasoning" else text
            if not text:
                return
            self._begin(kind, changes)
        self._grow(text, changes)

    def _begin(self, kind: Kind, changes: list[Change], id: str = "", name: str = "") -> None:
        self._close(changes)
        self._open = AnswerBlock(len(self.all), kind, id, name)
        self.all.append(self._open)
        changes.append(Began(self._open))

    def _grow(self, text: str, changes: list[Change]) -> None:
        block = self._open
        assert block is not None
        # Only visible text has logprobs in the answer; reasoning and calls have none.
        lines, self._unsaid = (self._unsaid if block.kind == "text" else []), []
        block.pieces.append(text)
        block.lines += lines
        changes.append(Grew(block, text, lines))

    def _close(self, changes: list[Change]) -> None:
        if self._open is not None:
            changes.append(Ended(self._open))
            self._open = None
