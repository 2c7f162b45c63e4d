"""What an answer means, before any API spells it: OpenAI's chat, its Responses and Anthropic's Messages are three
spellings of these events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(slots=True)
class Text:
    """More of the visible answer."""

    text: str


@dataclass(slots=True)
class Reasoning:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(slots=True)
class ToolStart:
    """A tool call begins: the index counts the calls of one sample."""

    index: int
    id: str
    name: str


@dataclass(slots=True)
class ToolArguments:
    """More of a call's arguments: pieces of one JSON text."""

    index: int
    text: str


Event = Text | Reasoning | ToolStart | ToolArguments


@dataclass(slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(slots=True)
class Finish:
    reason: str
    """stop, length, tool_calls, abort or error."""
    stop: int | str | None = None
    """The stop string or token that ended it."""
    error: str | None = None


@dataclass(slots=True)
class Turn:
    """One sample's part of one engine step."""

    index: int
    events: list[Event] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[int, tuple[float, str]]] | None = None
    finish: Finish | None = None


class OutputParser(Protocol):
    """Turns a model's raw text, however it is cut, into events. For any cutting the events add up to the same."""

    @property
    def wants_special_tokens(self) -> bool:
        """Markers may be special tokens: the engine has to spell them (`skip_special_tokens=False`)."""
        ...

    def push(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]:
        """What was held back because more text could have changed its meaning."""
        ...
