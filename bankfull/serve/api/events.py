"""The meaning of an answer, independent of the API's format: OpenAI's chat, its Responses and Anthropic's Messages
write the same events in three formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from bankfull.outputs import Delta
from bankfull.serve.api.prices import PricedUsage, TokenPrices


@dataclass(slots=True)
class Text:
    """More of the visible answer."""

    text: str


@dataclass(slots=True)
class Reasoning:
    """More of the model's reasoning before its answer."""

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
class Usage(PricedUsage):
    reasoning_tokens: int = 0
    prices: TokenPrices | None = None

    @property
    def cost(self) -> float | None:
        """What the call costs so far; None if the server has no prices."""
        return None if self.prices is None else self.prices.cost(self)


Turn = tuple[Delta, list[Event]]
"""One sample's part of one engine step: its tokens, and the meaning of their text. The finish reason is tool_calls
where the sample stopped to call a tool."""


class OutputParser(Protocol):
    """Turns a model's raw text into events. The pieces in which it arrives do not change their sum."""

    @property
    def wants_special_tokens(self) -> bool:
        """Markers may be special tokens: the engine has to spell them (`skip_special_tokens=False`)."""
        ...

    def push(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]:
        """The events of text that was held back, because more text could have changed its meaning."""
        ...
